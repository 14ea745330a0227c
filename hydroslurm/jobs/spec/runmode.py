"""How a job is run: to train, or to be looked at."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from hydroslurm.jobs.spec.part import Command, Part, as_tuple
from hydroslurm.jobs.spec.text import Line


class DebugReplica(Part):
    """What replicas of one type do instead of training."""

    type: Line = Field(default="worker", description="Which replicas. Default: worker.")
    command: Command = Field(
        default=("sleep", "infinity"),
        description="Run in the place of the command. Default: [sleep, infinity].",
    )
    skip_init: bool = Field(
        default=False, description="Do not run the init steps either. Default: false."
    )


class Debug(Part):
    """Everything is up, the training is not started: `hydroslurm attach` gives a shell there."""

    enable: bool = Field(default=False, description="Do not start the training. Default: false.")
    replica_specs: Annotated[tuple[DebugReplica, ...], BeforeValidator(as_tuple)] = Field(
        default=(),
        description="What replicas do instead; those of a type that is not listed sleep. "
        "Default: [].",
    )


class RunMode(Part):
    """How the job is run."""

    debug: Debug = Field(
        default_factory=Debug,
        description="Everything is up, the training is not started, and `hydroslurm attach` gives "
        "a shell there. Default: off.",
    )
