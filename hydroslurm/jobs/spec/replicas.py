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
)

RestartPolicy = Literal["Never", "OnFailure", "Always", "ExitCode"]

MASTER = "master"
"""The type, in lower case, whose exit ends the job."""
MOST_BYTES = 2**60
"""Of memory: 1 EiB."""


class EnvVar(Part):
    """One environment variable."""

    name: EnvName
    """Letters, digits and _. Required."""
    value: Text = ""
    """Always text: quote numbers, true and false. No shell expands it. Default: ""."""


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


def _number_or_text(pattern: str) -> WithJsonSchema:
    text = {"type": "string", "pattern": pattern}
    return WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, text]})


TasksPerNode = Annotated[int, Field(ge=1, le=1024)]
"""Ranks that share a node or a replica."""
Gpus = Annotated[int, Field(ge=0, le=1024)]
Environment = Annotated[tuple[EnvVar, ...], BeforeValidator(_env_list), _OrMapping()]
CpusPerTask = Annotated[int, Field(ge=1, le=65536)]
Cpus = Annotated[
    CpusPerTask,
    BeforeValidator(as_cpus),
    _number_or_text(CPUS_PATTERN),
]
Memory = Annotated[
    int,
    BeforeValidator(as_bytes),
    Field(ge=1, le=MOST_BYTES),
    _number_or_text(MEMORY_PATTERN),
]


class Resources(Part):
    """The resources of the replicas of one type."""

    nodes: Count | None = None
    """Nodes that the replicas of this type share evenly. [nodes] Default: one node per replica."""
    tasks: TasksPerNode = 1
    """Ranks per replica, each started by srun. With torchrun this must be 1; set
    torchrunConfig.procPerNode instead. [ranks per replica] Default: 1."""
    cpus: Cpus = 1
    """CPUs per task, such as 4 or 500m; rounded up, since Slurm allocates whole CPUs. [CPUs per
    task] Default: 1."""
    memory_bytes: Memory | None = Field(default=None, alias="memory")
    """Memory per replica, such as 8Gi, 512Mi, 2G or a number of bytes. [bytes per replica] Default:
    the partition's."""
    gpus: Gpus = 0
    """GPUs per replica; 0 requests none. [GPUs per replica] Default: 0."""

    @property
    def memory_mib(self) -> int | None:
        """In Slurm's unit, rounded up."""
        return None if self.memory_bytes is None else math.ceil(self.memory_bytes / 2**20)


class InitStep(Part):
    """A command that has to finish before the training of a replica starts."""

    name: Line = "init"
    """For messages. Default: init."""
    command: Command
    """The program and its first arguments. Required."""
    args: Words = ()
    """More arguments. Default: []."""


class Template(Part):
    """What each replica runs."""

    command: Command
    """The program and its first arguments, one item each; no shell expands them. python means the
    Python that hydroslurm is installed in, unless there is an image. Required."""
    args: Words = ()
    """More arguments. With command: [python] and the rest here, torchrun can be switched on and off
    without other changes. Default: []."""
    env: Environment = ()
    """Variables for the ranks, as {NAME: value} or a list of name and value. Values are never
    printed, and only you can read the run folder that holds them (0700). Default: []."""
    working_directory: Text | None = None
    """Where the command starts; relative to the folder of the spec. Default: that folder."""
    image: Line | None = None
    """Container image, run by pyxis (srun --container-image) or Apptainer; if the cluster has
    neither, the job is refused. Default: no container."""
    resources: Resources = Field(default_factory=Resources)
    """Resources of each replica. Default: one node, one task, one CPU."""
    init: Annotated[tuple[InitStep, ...], BeforeValidator(as_tuple)] = ()
    """Commands that run one after the other before each start of a replica; if one fails, the
    replica fails. Default: []."""


class ReplicaSpec(Part):
    """Identical replicas."""

    type: Annotated[Line, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")] = "worker"
    """Their name: letters, digits, _ and -. The master has rank 0, and the job ends when it does;
    without a master, that is the first replica of the first type. Default: worker."""
    replicas: Annotated[int, Field(ge=1, le=10_000)] = 1
    """How many there are. [replicas] Default: 1."""
    restart_policy: RestartPolicy = "OnFailure"
    """When all replicas are restarted because one has ended. Never: not at all; the job fails when
    its master fails, and goes on without a worker that fails. OnFailure: its status is not 0.
    Always: even if it is 0. ExitCode: its status is 130, 137, 138, 140 or 143, which stand for
    signals; another is as with Never. Every restart counts against backoffLimit; a preemption is
    not a failure. Default: OnFailure."""
    template: Template
    """What each replica runs. Required."""


class DebugReplica(Part):
    """What replicas of one type do instead of training."""

    type: Line = "worker"
    """Their type. Default: worker."""
    command: Command = ("sleep", "infinity")
    """Runs instead of the command. When it ends with 0, as a daemon's start does, the replica stays
    until the job is cancelled. Default: [sleep, infinity]."""
    skip_init: bool = False
    """Skip the init steps, too. Default: false."""


class Debug(Part):
    """Start everything but the training; `hydroslurm attach` gives a shell there."""

    enable: bool = False
    """Do not start the training. Default: false."""
    replica_specs: Annotated[tuple[DebugReplica, ...], BeforeValidator(as_tuple)] = ()
    """What replicas do instead; types that are not listed sleep. Default: []."""


class RunMode(Part):
    """Train, or debug."""

    debug: Debug = Field(default_factory=Debug)
    """Start everything but the training; `hydroslurm attach` gives a shell there. Default: off."""
