"""``TrainingJob``: what to run, how, and what happens when it is interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from hydroslurm.jobs.spec.fields import Line, Part, Printable, Words, as_tuple
from hydroslurm.jobs.spec.replicas import MASTER, ReplicaSpec, RunMode
from hydroslurm.jobs.spec.sections import (
    Elastic,
    Notify,
    Preemption,
    RunPolicy,
    Scheduler,
    TensorBoard,
    TorchrunConfig,
)
from hydroslurm.jobs.spec.source import Complaint, KeyPath, path_text

DOES_NOT_FIT = "does_not_fit"
"""pydantic's type of the error whose context holds complaints under ``found``."""


def _without_default(schema: JsonDict) -> None:
    schema.pop("default", None)


class TrainingJob(Part):
    """A PyTorch training job for Slurm: frozen and complete, with every default filled in.

    Ranks are numbered over the replicas in the order of their types, the master first.
    """

    api_version: Literal["hydroslurm/v1"] = "hydroslurm/v1"
    """Version of this format. Default: hydroslurm/v1."""
    kind: Literal["TrainingJob"] = "TrainingJob"
    """What the file describes. Default: TrainingJob."""
    name: Line = Field(default="training", json_schema_extra=_without_default)
    """The job's name in Slurm, also part of its run folder's name. Default: the name of the file,
    without its suffix."""
    labels: dict[Line, Printable] = Field(default_factory=dict)
    """For people and their tools; shown by `hydroslurm describe`. Default: {}."""
    replica_specs: Annotated[
        tuple[ReplicaSpec, ...], Field(min_length=1), BeforeValidator(as_tuple)
    ]
    """What to run, and how many of each. Required."""
    torchrun_config: TorchrunConfig = Field(default_factory=TorchrunConfig)
    """torch's elastic launcher between Slurm and the ranks. Default: off."""
    run_policy: RunPolicy = Field(default_factory=RunPolicy)
    """When to give the job up, and what to clean up then. Default: three restarts."""
    preflight: Words | None = None
    """Check run folder, clock, free memory and GPUs of each node before the ranks start, then run
    this command there in the folder of the first replica; []: no command. A node that fails is left
    out and the job requeued. Default: no check."""
    scheduler: Scheduler = Field(default_factory=Scheduler)
    """Where to run the job in Slurm. Default: the site's."""
    tensorboard: TensorBoard | None = None
    """A TensorBoard that runs as long as the job. Default: none."""
    notify: Notify = ()
    """Who gets a JSON document at each stop, resume, failure and end: a command, as a list, on its
    stdin in the first replica's working directory; or a webhook, as text, by POST. Default: []."""
    run_mode: RunMode = Field(default_factory=RunMode)
    """Train, or debug. Default: train."""
    preemption: Preemption = Field(default_factory=Preemption)
    """What to do when another job needs the nodes. Default: park or requeue, as Slurm asks."""
    elastic: Elastic | None = None
    """Train on while nodes come and go, each of them a job of its own. Default: one job of a fixed
    size."""

    @property
    def replicas(self) -> int:
        """The number of replicas of all types."""
        return sum(spec.replicas for spec in self.replica_specs)

    @property
    def members(self) -> int:
        """How many members an elastic job begins with."""
        assert self.elastic is not None
        asked = self.replicas if self.replicas > 1 else self.elastic.max
        return self.elastic.size or asked

    @property
    def has_agent(self) -> bool:
        """Whether torchrun's agent starts the ranks, as far as the spec tells."""
        elastic = self.elastic
        return self.torchrun_config.enable or (elastic is not None and elastic.engine == "restart")

    @model_validator(mode="after")
    def _fits_together(self) -> TrainingJob:
        if self.elastic is not None and self.has_agent:  # a default that hangs on other fields
            vars(self)["elastic"] = self.elastic.of_agents()
        found = complaints(self)
        if found:
            message = "; ".join(f"{path_text(one.path)}: {one.message}" for one in found)
            # as a value: braces in a user's text must not be part of pydantic's template
            raise PydanticCustomError(
                DOES_NOT_FIT, "{message}", {"message": message, "found": found}
            )
        return self


# --- fields that are valid one by one, but do not fit together

MOST_RANKS = 65536

_TORCHRUN = ("torchrunConfig",)
_ENABLE = (*_TORCHRUN, "enable")
_PROCS = (*_TORCHRUN, "procPerNode")


def complaints(job: TrainingJob) -> tuple[Complaint, ...]:
    """All problems, in the order of the fields."""
    found = [*_types(job), *_size(job)]
    for number, spec in enumerate(job.replica_specs):
        found += _of_replicas(job, spec, ("replicaSpecs", number))
    found += [*_min_nodes(job), *_debug(job), *_warning(job)]
    return (*found, *(_elastic(job, job.elastic) if job.elastic is not None else ()))


def unused(job: TrainingJob) -> Iterator[Complaint]:
    """What is not wrong but has no effect in this job; users should know."""
    torchrun = job.torchrun_config
    if job.elastic is not None and job.run_policy.active_deadline_seconds is not None:
        message = "the members of an elastic job hold their nodes each for itself; nothing is added"
        yield Complaint(("runPolicy", "activeDeadlineSeconds"), message)
    for number, spec in enumerate(job.replica_specs):
        if job.elastic is not None and "restart_policy" in spec.model_fields_set:
            message = "a member of an elastic job that fails is replaced, within backoffLimit"
            yield Complaint(("replicaSpecs", number, "restartPolicy"), message)
    if not torchrun.enable and torchrun.proc_per_node != "1":
        message = (
            f"{torchrun.proc_per_node}: counts with torchrun; without it a replica has as many "
            "ranks as its resources.tasks"
        )
        yield Complaint(_PROCS, message)


def _types(job: TrainingJob) -> Iterator[Complaint]:
    types = [spec.type.lower() for spec in job.replica_specs]
    for number, spec in enumerate(job.replica_specs):
        if types.index(types[number]) < number:
            message = f"{spec.type!r} is there already; add up the replicas of one type"
            yield Complaint(("replicaSpecs", number, "type"), message, (("replicaSpecs",),))


def _size(job: TrainingJob) -> Iterator[Complaint]:
    ranks = sum(one.replicas * one.template.resources.tasks for one in job.replica_specs)
    if ranks > MOST_RANKS:
        message = f"{ranks} ranks in all; at most {MOST_RANKS} can be laid out"
        yield Complaint(("replicaSpecs",), message)


def _of_replicas(job: TrainingJob, spec: ReplicaSpec, at: KeyPath) -> Iterator[Complaint]:
    resources, torchrun = spec.template.resources, job.torchrun_config
    where = (*at, "template", "resources")
    replicas, kind = (*at, "replicas"), (*at, "type")
    if spec.type.lower() == MASTER and spec.replicas != 1:
        message = f"{spec.replicas} masters; there can be one, whose end is the job's"
        yield Complaint(replicas, message, (kind,))
    if resources.nodes is not None and spec.replicas % resources.nodes:
        message = f"{spec.replicas} replicas cannot be shared evenly by {resources.nodes} nodes"
        yield Complaint((*where, "nodes"), message, (replicas,))
    if torchrun.enable and resources.tasks != 1:
        message = (
            f"{resources.tasks}, but with torchrun a replica is one agent; say "
            "torchrunConfig.procPerNode instead"
        )
        yield Complaint((*where, "tasks"), message, (_ENABLE,))
    if torchrun.enable and torchrun.proc_per_node == "gpu" and not resources.gpus:
        message = "torchrunConfig.procPerNode is gpu, and no GPU is asked for here"
        yield Complaint((*where, "gpus"), message, (_ENABLE, _PROCS))
    seen: set[str] = set()
    for number, one in enumerate(spec.template.env):
        if one.name in seen:
            message = f"{one.name!r} is there already; one of the two would be lost"
            yield Complaint((*at, "template", "env", number, "name"), message)
        seen.add(one.name)


def _min_nodes(job: TrainingJob) -> Iterator[Complaint]:
    least = job.torchrun_config.min_nodes
    if least is not None and least > job.replicas:
        message = f"{least} is more than the {job.replicas} replicas that there are"
        yield Complaint((*_TORCHRUN, "minNodes"), message, (("replicaSpecs",),))


def _debug(job: TrainingJob) -> Iterator[Complaint]:
    types = [spec.type for spec in job.replica_specs]
    for number, one in enumerate(job.run_mode.debug.replica_specs):
        if one.type.lower() not in (name.lower() for name in types):
            message = f"there is no replica type {one.type!r}; wanted one of {', '.join(types)}"
            path = ("runMode", "debug", "replicaSpecs", number, "type")
            yield Complaint(path, message, (("replicaSpecs",),))


def _warning(job: TrainingJob) -> Iterator[Complaint]:
    limit_min, warning_s = job.scheduler.time_limit_minutes, job.preemption.warning_seconds
    if limit_min is not None and warning_s >= 60 * limit_min:
        message = (
            f"{warning_s} s before a limit of {limit_min} min would be at the start; shorten it, "
            "or raise scheduler.timeLimitMinutes"
        )
        path = ("preemption", "warningSeconds")
        yield Complaint(path, message, (("scheduler", "timeLimitMinutes"),))


def _elastic_sums(elastic: Elastic) -> Iterator[Complaint]:
    """What a step's samples, sums and learning rate have to do with each other."""
    own = ("elastic",)
    if elastic.lr != "none" and elastic.batch == "keep_global":
        message = (
            f"{elastic.lr} follows the samples of a step, and batch: keep_global keeps these; say "
            "batch: per_rank, or leave lr out"
        )
        yield Complaint((*own, "lr"), message, ((*own, "batch"),))
    if elastic.summation == "fixed_order" and elastic.batch != "keep_global":
        message = (
            f"fixed_order adds up the same shards at every size, and batch: {elastic.batch} has "
            "others; say batch: keep_global, or leave summation out"
        )
        yield Complaint((*own, "summation"), message, ((*own, "batch"),))
    if elastic.averaging is not None and elastic.summation != "all_reduce":
        message = (
            f"averages weights and sums no gradients, and summation: {elastic.summation} says how "
            "they are summed; leave one of them out"
        )
        yield Complaint((*own, "averaging"), message, ((*own, "summation"),))


def of_restart(job: TrainingJob, elastic: Elastic) -> Iterator[Complaint]:
    """What does not go with ranks that are started again in each generation."""
    own = ("elastic",)
    engine = (*own, "engine")
    if elastic.engine == "in_place":
        message = (
            f"{elastic.engine} keeps the processes, and torchrunConfig.enable has agents that "
            "start them again; say engine: restart, or leave torchrunConfig out and give the ranks "
            "of a member as resources.tasks"
        )
        yield Complaint(engine, message, (_ENABLE,))
        return
    kept = {
        "batch": "keep_global",
        "summation": "fixed_order",
    }
    wanted = [name for name, value in kept.items() if getattr(elastic, name) == value]
    if elastic.averaging is not None:
        wanted.append("averaging")
    if elastic.lr != "none":
        wanted.append("lr")
    for name in wanted:
        value = getattr(elastic, name)
        given = f"{value}: " if isinstance(value, str) else ""
        message = (
            f"{given}only engine: in_place sees to that, between two steps of a hydroslurm.Run; "
            "with engine: restart the ranks are started again, and each keeps its own batch size. "
            "Leave it out, or say engine: in_place"
        )
        yield Complaint((*own, name), message, (engine, _ENABLE))
    torchrun = job.torchrun_config
    if torchrun.min_nodes is not None:
        message = f"{torchrun.min_nodes}, and elastic.min says it; leave it out"
        yield Complaint((*_TORCHRUN, "minNodes"), message, (own,))


def _elastic(job: TrainingJob, elastic: Elastic) -> Iterator[Complaint]:
    own = ("elastic",)
    if elastic.min > elastic.max:
        message = f"{elastic.min} is more than max, {elastic.max}; lower it, or raise max"
        yield Complaint((*own, "min"), message, ((*own, "max"),))
    elif not elastic.min <= job.members <= elastic.max:
        named = elastic.size is not None
        at: KeyPath = (*own, "size") if named else ("replicaSpecs", 0, "replicas")
        message = (
            f"{job.members} members to begin with, and elastic allows {elastic.min} to "
            f"{elastic.max}; wanted min <= {'size' if named else 'replicas'} <= max"
        )
        yield Complaint(at, message, (own,))
    yield from _elastic_sums(elastic)
    if len(job.replica_specs) > 1:
        message = (
            f"{len(job.replica_specs)} types of replicas; the members of an elastic job are alike: "
            "leave one, or leave elastic out"
        )
        yield Complaint(("replicaSpecs",), message, (own,))
    resources = job.replica_specs[0].template.resources
    if resources.nodes is not None:
        where = ("replicaSpecs", 0, "template", "resources", "nodes")
        yield Complaint(where, "each member of an elastic job is one node; omit it", (own,))
    if job.has_agent:
        yield from of_restart(job, elastic)
    if job.run_mode.debug.enable:
        message = "true, and an elastic job has nothing to hold; leave elastic out while debugging"
        yield Complaint(("runMode", "debug", "enable"), message, (own,))
