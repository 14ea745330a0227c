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
"""The type, in lower case, whose exit ends the job."""
MOST_BYTES = 2**60
"""Of memory: 1 EiB."""


class EnvVar(Part):
    """One environment variable."""

    name: EnvName = Field(description="Letters, digits and _. Required.")
    value: Text = Field(
        default="",
        description='Always text: quote numbers, true and false. No shell expands it. Default: "".',
    )


def _env_list(value: object) -> object:
    """Accept both forms of an environment, ``{NAME: value}`` and Kubernetes' list."""
    if isinstance(value, Mapping):
        return tuple({"name": name, "value": text} for name, text in value.items())
    if isinstance(value, str):
        raise ValueError("wanted variables as {NAME: value}, got one text")
    return as_tuple(value)


class _OrMapping:
    """Adds ``{NAME: value}`` to the JSON Schema of a list of variables."""

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
    """The resources of the replicas of one type."""

    nodes: Count | None = Field(
        default=None,
        description="Nodes that the replicas of this type share evenly. Default: one node per "
        "replica.",
        json_schema_extra=unit("nodes"),
    )
    tasks: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Ranks per replica, each started by srun. With torchrun this must be 1; set "
        "torchrunConfig.procPerNode instead. Default: 1.",
        json_schema_extra=unit("ranks per replica"),
    )
    cpus: Cpus = Field(
        default=1,
        description="CPUs per task, such as 4 or 500m; rounded up, since Slurm allocates whole "
        "CPUs. Default: 1.",
        json_schema_extra=unit("CPUs per task"),
    )
    memory_bytes: Memory | None = Field(
        default=None,
        alias="memory",
        description="Memory per replica, such as 8Gi, 512Mi, 2G or a number of bytes. Default: the "
        "partition's.",
        json_schema_extra=unit("bytes per replica"),
    )
    gpus: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0,
        description="GPUs per replica; 0 requests none. Default: 0.",
        json_schema_extra=unit("GPUs per replica"),
    )

    @property
    def memory_mib(self) -> int | None:
        """In Slurm's unit, rounded up."""
        return None if self.memory_bytes is None else math.ceil(self.memory_bytes / 2**20)


class InitStep(Part):
    """A command that has to finish before the training of a replica starts."""

    name: Line = Field(default="init", description="For messages. Default: init.")
    command: Command = Field(description="The program and its first arguments. Required.")
    args: Words = Field(default=(), description="More arguments. Default: [].")


class Template(Part):
    """What each replica runs."""

    command: Command = Field(
        description="The program and its first arguments, one item each; no shell expands them. "
        "python means the Python that hydroslurm is installed in, unless there is an image. "
        "Required.",
    )
    args: Words = Field(
        default=(),
        description="More arguments. With command: [python] and the rest here, torchrun can be "
        "switched on and off without other changes. Default: [].",
    )
    env: Environment = Field(
        default=(),
        description="Variables for the ranks, as {NAME: value} or a list of name and value. Values "
        "are never printed, and only you can read the run folder that holds them (0700). "
        "Default: [].",
    )
    working_directory: Text | None = Field(
        default=None,
        description="Where the command starts; relative to the folder of the spec. Default: that "
        "folder.",
    )
    image: Line | None = Field(
        default=None,
        description="Container image, run by pyxis (srun --container-image) or Apptainer; if the "
        "cluster has neither, the job is refused. Default: no container.",
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Resources of each replica. Default: one node, one task, one CPU.",
    )
    init: Annotated[tuple[InitStep, ...], BeforeValidator(as_tuple)] = Field(
        default=(),
        description="Commands that run one after the other before each start of a replica; if one "
        "fails, the replica fails. Default: [].",
    )


class ReplicaSpec(Part):
    """Identical replicas."""

    type: Annotated[Line, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")] = Field(
        default="worker",
        description="Their name: letters, digits, _ and -. The master has rank 0, and the job ends "
        "when it does; without a master, that is the first replica of the first type. "
        "Default: worker.",
    )
    replicas: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1, description="How many there are. Default: 1.", json_schema_extra=unit("replicas")
    )
    restart_policy: RestartPolicy = Field(
        default="OnFailure",
        description="When all replicas are restarted because one has ended. Never: not at all; the "
        "job fails when its master fails, and goes on without a worker that fails. OnFailure: its "
        "status is not 0. Always: even if it is 0. ExitCode: its status is 130, 137, 138, 140 or "
        "143, which stand for signals; another is as with Never. Every restart counts against "
        "backoffLimit; a preemption is not a failure. Default: OnFailure.",
    )
    template: Template = Field(description="What each replica runs. Required.")


class DebugReplica(Part):
    """What replicas of one type do instead of training."""

    type: Line = Field(default="worker", description="Their type. Default: worker.")
    command: Command = Field(
        default=("sleep", "infinity"),
        description="Runs instead of the command. When it ends with 0, as a daemon's start does, "
        "the replica stays until the job is cancelled. Default: [sleep, infinity].",
    )
    skip_init: bool = Field(default=False, description="Skip the init steps, too. Default: false.")


class Debug(Part):
    """Start everything but the training; `hydroslurm attach` gives a shell there."""

    enable: bool = Field(default=False, description="Do not start the training. Default: false.")
    replica_specs: Annotated[tuple[DebugReplica, ...], BeforeValidator(as_tuple)] = Field(
        default=(),
        description="What replicas do instead; types that are not listed sleep. Default: [].",
    )


class RunMode(Part):
    """Train, or debug."""

    debug: Debug = Field(
        default_factory=Debug,
        description="Start everything but the training; `hydroslurm attach` gives a shell there. "
        "Default: off.",
    )
