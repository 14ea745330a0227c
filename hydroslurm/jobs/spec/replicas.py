"""What is run and how often: replicas, their template and resources, and debug mode instead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from hydroslurm.jobs.spec.fields import (
    CPUS_PATTERN,
    MEMORY_PATTERN,
    Command,
    Count,
    EnvName,
    Line,
    Part,
    Text,
    Words,
    as_bytes,
    as_cpus,
    as_tuple,
    unit,
)

RestartPolicy = Literal["Never", "OnFailure", "Always", "ExitCode"]

MASTER = "master"
"""The type, in small letters, whose end is the job's."""
MOST_BYTES = 2**60
"""Of memory; a GiB of GiB."""


class EnvVar(Part):
    """One variable of the environment."""

    name: EnvName = Field(description="Letters, digits and _. Required.")
    value: Text = Field(
        default="",
        description="Always text: numbers, true and false go in quotes. No shell reads it. "
        'Default: "".',
    )


def _env_list(value: object) -> object:
    """Both ways of writing an environment, ``{NAME: value}`` and Kubernetes' list."""
    if isinstance(value, Mapping):
        return tuple({"name": name, "value": text} for name, text in value.items())
    if isinstance(value, str):
        raise ValueError("wanted variables as {NAME: value}, got one text")
    return as_tuple(value)


class _OrMapping:
    """Adds ``{NAME: value}`` to what JSON Schema says of a list of variables."""

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        mapping = {"type": "object", "additionalProperties": {"type": "string"}}
        return {"anyOf": [mapping, handler(core_schema)]}


Environment = Annotated[tuple[EnvVar, ...], BeforeValidator(_env_list), _OrMapping()]
Cpus = Annotated[
    int,
    BeforeValidator(as_cpus),
    Field(ge=1, le=65536),
    WithJsonSchema({
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0},
            {"type": "string", "pattern": CPUS_PATTERN},
        ]
    }),
]  # fmt: skip
Memory = Annotated[
    int,
    BeforeValidator(as_bytes),
    Field(ge=1, le=MOST_BYTES),
    WithJsonSchema({
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0},
            {"type": "string", "pattern": MEMORY_PATTERN},
        ]
    }),
]  # fmt: skip


class Resources(Part):
    """What the replicas of one type get."""

    nodes: Count | None = Field(
        default=None,
        description="Nodes that the replicas of this type share evenly. Default: a node for each "
        "replica.",
        json_schema_extra=unit("nodes"),
    )
    tasks: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Ranks of one replica, each started by srun. With torchrun it is "
        "torchrunConfig.procPerNode that counts, and this must be 1. Default: 1.",
        json_schema_extra=unit("ranks per replica"),
    )
    cpus: Cpus = Field(
        default=1,
        description="CPUs of one task, as 4 or 500m; rounded up, for Slurm gives out whole ones. "
        "Default: 1.",
        json_schema_extra=unit("CPUs per task"),
    )
    memory_bytes: Memory | None = Field(
        default=None,
        alias="memory",
        description="Memory of one replica, as 8Gi, 512Mi, 2G or a number of bytes. Default: what "
        "the partition gives.",
        json_schema_extra=unit("bytes per replica"),
    )
    gpus: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0,
        description="GPUs of one replica; 0 asks for none. Default: 0.",
        json_schema_extra=unit("GPUs per replica"),
    )

    @property
    def memory_mib(self) -> int | None:
        """In Slurm's unit, rounded up."""
        return None if self.memory_bytes is None else math.ceil(self.memory_bytes / 2**20)


class InitStep(Part):
    """A command that runs to its end before the training of a replica is started."""

    name: Line = Field(default="init", description="For messages. Default: init.")
    command: Command = Field(description="The program and its first arguments. Required.")
    args: Words = Field(default=(), description="More arguments. Default: [].")


class Template(Part):
    """What a replica runs."""

    command: Command = Field(
        description="The program and its first arguments, one item each; no shell reads them. "
        "python is the Python that hydroslurm was installed in, unless an image is given. "
        "Required.",
    )
    args: Words = Field(
        default=(),
        description="More arguments. With command: [python] and the rest here, switching torchrun "
        "on and off needs no other change. Default: [].",
    )
    env: Environment = Field(
        default=(),
        description="Variables for the ranks, as {NAME: value} or a list of name and value. Values "
        "are never printed, and the run folder that holds them is yours alone (0700). Default: [].",
    )
    working_directory: Text | None = Field(
        default=None,
        description="Where the command is started; a relative one begins at the folder of the "
        "spec. Default: that folder.",
    )
    image: Line | None = Field(
        default=None,
        description="Container image, run by pyxis (srun --container-image) or Apptainer; where "
        "the cluster has neither, the job is refused. Default: no container.",
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="What a replica gets. Default: a node, one task, one CPU.",
    )
    init: Annotated[tuple[InitStep, ...], BeforeValidator(as_tuple)] = Field(
        default=(),
        description="Commands that run one after the other before each start of a replica; one "
        "that fails fails the replica. Default: [].",
    )


class ReplicaSpec(Part):
    """Replicas that are alike."""

    type: Annotated[Line, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")] = Field(
        default="worker",
        description="What they are called: letters, digits, _ and -. master has rank 0, and its "
        "end is the job's; without a master, that is the first replica of the first type. "
        "Default: worker.",
    )
    replicas: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1, description="How many. Default: 1.", json_schema_extra=unit("replicas")
    )
    restart_policy: RestartPolicy = Field(
        default="OnFailure",
        description="What a replica's end means. Never: a failure is final. OnFailure: all are "
        "started again unless its status is 0. Always: also then; every restart counts "
        "against backoffLimit. ExitCode: only after 130, 137, "
        "138, 140 and 143, which are signals. A preemption is no failure. Default: OnFailure.",
    )
    template: Template = Field(description="What each of them runs. Required.")


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
