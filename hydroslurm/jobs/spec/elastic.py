"""The section ``elastic`` of a job spec: a training whose nodes come and go while it runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hydroslurm.elastic.autoscale import SCALE_DOWN, SCALE_UP
from hydroslurm.jobs.spec.fields import Count, Part, SlurmWord, Whole

MOST_MEMBERS = 4096
Members = Annotated[int, Field(ge=1, le=MOST_MEMBERS)]


class ElasticBase(Part):
    """Where the first ``min`` members and the coordinator run, if not where the others do."""

    partition: SlurmWord | None = None
    """A partition whose jobs are not preempted, or less. Default: scheduler's."""
    qos: SlurmWord | None = None
    """A quality of service whose jobs are not preempted, or less. Default: scheduler's."""


class Averaging(Part):
    """The members train apart, and their weights are averaged now and then (local SGD)."""

    every: Count
    """After how many steps. The members' gradients are not summed between. [steps] Required."""


Fraction = Annotated[float, Field(gt=0, le=1, strict=False)]
Positive = Annotated[float, Field(gt=0, le=1e9, strict=False)]


class ScaleUp(Part):
    """How far and how often the size grows."""

    stabilization_window_s: Whole = SCALE_UP.stabilization_window_s
    """The most cautious recommendation of so long counts, so that what flaps moves nothing.
    [seconds] Default: 60."""
    cooldown_s: Whole = SCALE_UP.cooldown_s
    """So long after a change of the size nothing moves this way. [seconds] Default: 180."""
    step: Count = SCALE_UP.step
    """At most so many members at once. [members] Default: 4."""


class ScaleDown(ScaleUp):
    """How far and how often the size shrinks."""

    stabilization_window_s: Whole = SCALE_DOWN.stabilization_window_s
    """The most cautious recommendation of so long counts, so that what flaps moves nothing.
    [seconds] Default: 300."""


class Autoscale(Part):
    """Rules by which the run chooses how many members it wants, between ``min`` and ``max``."""

    dry_run: bool = False
    """Decide, and only record what would have been done. Default: false."""
    partition: SlurmWord | None = None
    """Whose queue counts. Default: scheduler's."""
    step_time_s: Positive | None = None
    """Target of the time of a step. [seconds] Default: none."""
    cpu: Fraction | None = None
    """Target of the use of the nodes' CPUs, 0 to 1. [part of 1] Default: none."""
    memory: Fraction | None = None
    """Target of the use of the nodes' memory, without page cache, 0 to 1. [part of 1] Default:
    none."""
    gpu: Fraction | None = None
    """Target of the use of the GPUs, 0 to 1. [part of 1] Default: none."""
    queue_length: Whole | None = None
    """Give nodes back while more jobs of others wait in the partition. [jobs] Default: the queue
    does not count."""
    tolerance: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.1
    """A target that is missed by less than this part of it is met. [part of 1] Default: 0.1."""
    scale_up: ScaleUp = Field(default_factory=ScaleUp)
    """How it grows. Default: see its fields."""
    scale_down: ScaleDown = Field(default_factory=ScaleDown)
    """How it shrinks. Default: see its fields."""


class Elastic(Part):
    """Members, each a node of its own job in Slurm, that may come and go while the others train."""

    min: Members = 1
    """Fewer members do not train: the run is suspended until there are enough. [members] Default:
    1."""
    max: Members
    """More members are not taken in. [members] Required."""
    size: Members | None = None
    """How many members are wanted to begin with; `hydroslurm scale` changes it. [members] Default:
    replicas where that is more than 1, else max."""
    spares: Whole = 0
    """How many members more are kept ready to take the place of one that leaves. [members] Default:
    0."""
    batch: Literal["keep_global", "per_rank"] = "keep_global"
    """What a change of size does to the batches. keep_global: a step has as many samples as with
    max members, in other shares. per_rank: each rank keeps its batch size, and a step has more
    samples or fewer, as always with engine: restart. Default: keep_global."""
    summation: Literal["all_reduce", "fixed_order"] = "all_reduce"
    """How the ranks' gradients are added up, with batch: keep_global. fixed_order: in one order for
    every size, so that losses and weights are bit for bit those of a fixed size; the script goes
    over run.shards(batch). all_reduce: as is fastest. Default: all_reduce."""
    averaging: Averaging | None = None
    """Average the members' weights now and then instead of their gradients in each step: fewer
    bytes, and another training. Default: gradients are summed."""
    lr: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows the size, with batch: per_rank; the script's is that of max
    members. linear: in proportion; sqrt: with the square root. Default: none."""
    lr_warmup_steps: Whole = 0
    """After a change of size the learning rate goes to its new value in so many steps. [steps]
    Default: 0."""
    engine: Literal["auto", "in_place", "restart"] = "auto"
    """How the ranks form a new generation. in_place: in the same processes, which make their
    process groups anew. restart: they save and leave, and torchrun's agents start them anew, for
    any script. auto: restart with torchrunConfig.enable and for scripts that shard their model
    (FSDP), else in_place. Default: auto."""
    base: ElasticBase = Field(default_factory=ElasticBase)
    """Where the first min members and the coordinator run. Default: as the others."""
    autoscale: Autoscale | None = None
    """Rules by which the run chooses its size. Default: it has the size that people ask for."""
    exclude_after_failures: Count = 2
    """A node on which so many members have failed gets no more of them. [failures] Default: 2."""

    def of_agents(self) -> Elastic:
        """With the batches that ranks have which are started anew, unless the spec names others."""
        if "batch" in self.model_fields_set:
            return self
        return self.model_copy(update={"batch": "per_rank"})
