"""``TrainingJob``: what a user wants to run, how, and what is to happen when it is interrupted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from hydroslurm.jobs.spec.consistency import complaints
from hydroslurm.jobs.spec.fields import Line, Part, Printable, as_tuple
from hydroslurm.jobs.spec.replicas import ReplicaSpec
from hydroslurm.jobs.spec.sections import Preemption, RunMode, RunPolicy, Scheduler, TensorBoard
from hydroslurm.jobs.spec.source import path_text
from hydroslurm.jobs.spec.torchrun import TorchrunConfig

DOES_NOT_FIT = "does_not_fit"
"""pydantic's name for the error whose context holds complaints under ``found``."""


def _without_default(schema: JsonDict) -> None:
    schema.pop("default", None)


class TrainingJob(Part):
    """A PyTorch training job for Slurm: frozen and complete, every default filled in.

    Ranks are counted over the replicas in the order of their types, the master's first.
    """

    api_version: Literal["hydroslurm/v1"] = Field(
        default="hydroslurm/v1", description="Version of this format. Default: hydroslurm/v1."
    )
    kind: Literal["TrainingJob"] = Field(
        default="TrainingJob", description="What the file describes. Default: TrainingJob."
    )
    name: Line = Field(
        default="training",
        description="The job's name in Slurm, and part of its run folder's. Default: the name of "
        "the file, without its suffix.",
        json_schema_extra=_without_default,
    )
    labels: dict[Line, Printable] = Field(
        default_factory=dict,
        description="For people and their tools; shown by `hydroslurm describe`. Default: {}.",
    )
    replica_specs: Annotated[
        tuple[ReplicaSpec, ...], Field(min_length=1), BeforeValidator(as_tuple)
    ] = Field(description="What is run, and how often. Required.")
    torchrun_config: TorchrunConfig = Field(
        default_factory=TorchrunConfig,
        description="torch's elastic launcher between Slurm and the ranks. Default: off.",
    )
    run_policy: RunPolicy = Field(
        default_factory=RunPolicy,
        description="When the job is given up, and what is left then. Default: three restarts.",
    )
    scheduler: Scheduler = Field(
        default_factory=Scheduler,
        description="Where in Slurm the job goes. Default: the site's.",
    )
    tensorboard: TensorBoard | None = Field(
        default=None,
        description="A TensorBoard that is there as long as the job runs. Default: none.",
    )
    run_mode: RunMode = Field(
        default_factory=RunMode, description="How the job is run. Default: to train."
    )
    preemption: Preemption = Field(
        default_factory=Preemption,
        description="What happens when somebody else wants the nodes. Default: it parks or is "
        "requeued, as Slurm asks.",
    )

    @property
    def replicas(self) -> int:
        """Of all types together."""
        return sum(spec.replicas for spec in self.replica_specs)

    @model_validator(mode="after")
    def _fits_together(self) -> TrainingJob:
        found = complaints(self)
        if found:
            message = "; ".join(f"{path_text(one.path)}: {one.message}" for one in found)
            # the braces of a user's text are none of pydantic's template
            raise PydanticCustomError(
                DOES_NOT_FIT, "{message}", {"message": message, "found": found}
            )
        return self
