"""The sections of a job spec beside its replicas: runPolicy, preemption, scheduler, tensorboard,
torchrunConfig and elastic. And the same for a script, which asks Slurm by options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from hydroslurm.elastic.autoscale import SCALE_DOWN, SCALE_UP
from hydroslurm.elastic.roster import Batch, LearningRate, Summation
from hydroslurm.errors import UsageError
from hydroslurm.jobs.spec.fields import (
    Count,
    Line,
    OptionName,
    Part,
    SlurmWord,
    Text,
    Whole,
    Words,
    as_tuple,
    is_text,
    slurm_word,
)
from hydroslurm.jobs.spec.replicas import MOST_BYTES, CpusPerTask, Gpus, TasksPerNode

CleanPolicy = Literal["None", "All", "Unfinished"]
PreemptionMode = Literal["pause", "requeue", "both"]
VacateMode = Literal["always", "when_asked", "never"]


class RunPolicy(Part):
    """When to give the job up, and what to clean up then."""

    backoff_limit: Whole = 3
    """How often restartPolicy may restart the job, for all replicas together. After that nothing is
    restarted, as with Never: the job fails when the master fails again, and goes on without a
    worker that fails. Preemptions do not count. [restarts] Default: 3."""
    preemption_limit: Whole | None = None
    """How often the job may be preempted or requeued; after that the next preemption makes it fail.
    [preemptions] Default: unlimited."""
    active_deadline_seconds: Count | None = None
    """How long the job may hold its nodes, over all attempts, not counting the time that it is
    suspended. [seconds] Default: unlimited."""
    max_excluded_nodes: Whole = 2
    """How many nodes the job may leave out because they fail; 0: none. [nodes] Default: 2."""
    clean_policy: CleanPolicy = "Unfinished"
    """What to do once the job has succeeded or failed. Unfinished: end replicas that still run.
    All: also remove the scratch folders. None: let replicas run to their end and remove nothing.
    Default: Unfinished."""


class Preemption(Part):
    """What to do when another job needs the nodes."""

    mode: PreemptionMode = "both"
    """pause: park when suspended, and resume in place. requeue: save, exit, requeue and resume from
    the checkpoint. both: whichever Slurm asks for. Default: both."""
    warning_seconds: Annotated[int, Field(ge=1, le=65535)] = 120
    """How long before the time limit the ranks are told to save; Slurm may warn up to 60 s earlier.
    [seconds] Default: 120."""
    vacate: VacateMode = "when_asked"
    """Whether a pause also moves the device memory to the host, so that another job can have it.
    when_asked: hydroslurm pause --vacate does. Default: when_asked."""
    checkpoint_directory: Text | None = None
    """Where a hydroslurm.Run in the script saves; relative to the folder of the spec. Default:
    checkpoints in the run folder."""
    save_every_seconds: Whole | None = None
    """The most that such a Run trains between two saves; 0: it saves only when it is stopped.
    [seconds] Default: the script's, else 600."""
    attempts_without_progress: Count | None = None
    """End the job after so many attempts of such a Run in a row that begin at the same step.
    [attempts] Default: the script's, else 5."""


_SBATCH_RESERVED = frozenset({
    "job-name", "comment", "output", "error", "input", "nodes", "ntasks", "ntasks-per-node",
    "cpus-per-task", "mem", "gpus-per-node", "gres", "partition", "qos", "account", "reservation",
    "nice", "time", "signal", "requeue", "no-requeue", "open-mode", "array", "wrap", "chdir",
    "export", "export-file", "priority", "dependency", "wait", "parsable", "test-only", "uid",
    "gid", "help", "usage", "version",
})  # fmt: skip
"""Options of sbatch that ``scheduler.options`` refuses."""


def _not_ours(name: str, *, free: frozenset[str] = frozenset()) -> str:
    bare = name.replace("_", "-")
    # sbatch accepts any unambiguous prefix of an option
    if bare not in free and any(one.startswith(bare) for one in _SBATCH_RESERVED):
        raise ValueError(f"{name!r} is set by hydroslurm, or has a field of its own")
    return name


def _sbatch_value(value: object) -> object:
    if value is True:
        return value
    if value is False:
        raise ValueError("an option cannot be false; omit it")
    if isinstance(value, (list, dict)):
        raise ValueError("wanted one word, or true for an option without a value")
    return slurm_word(str(is_text(value)))


Nice = Annotated[int, Field(ge=0, le=2147483645)]
"""What a user may subtract from a job's priority."""
FreeOption = Annotated[OptionName, AfterValidator(_not_ours)]
"""An option of sbatch that hydroslurm leaves to the user."""
SbatchValue = Annotated[
    Any,
    AfterValidator(_sbatch_value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"const": True}]}),
]
"""A word for an option of sbatch; true for one that takes none."""


class Scheduler(Part):
    """Where to run the job in Slurm."""

    partition: SlurmWord | None = None
    """Partition, or several separated by commas; other systems call it a queue. Default: the
    site's."""
    qos: SlurmWord | None = None
    """Quality of service, which may raise a job's priority or make it preemptible, as the site has
    set it up. Default: the account's."""
    account: SlurmWord | None = None
    """Account to charge. Default: the user's."""
    reservation: SlurmWord | None = None
    """Reservation to run in. Default: none."""
    nice: Nice = 0
    """Subtracted from the job's priority, so that others go first. No field raises the priority:
    only operators of Slurm may. [points of priority] Default: 0."""
    time_limit_minutes: Count | None = None
    """Time limit of each attempt. A job that saves when it is warned (preemption.warningSeconds) is
    requeued and resumes. [minutes] Default: the partition's."""
    options: dict[FreeOption, SbatchValue] = Field(default_factory=dict)
    """More sbatch options by their long names, such as {constraint: a100, exclusive: true}. Those
    that hydroslurm sets are refused. Default: {}."""


class TensorBoard(Part):
    """A TensorBoard that runs as long as the job; `hydroslurm describe` shows its address."""

    log_directory: Text = "runs"
    """The folder that it shows; relative to the folder of the spec. Default: runs."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port; 0 picks a free one. [port] Default: 0."""
    host: Line = "127.0.0.1"
    """Address to bind. The default can only be reached through ssh, because TensorBoard asks for no
    password. Default: 127.0.0.1."""


_WEBHOOK = r"^https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[!-~]*)?$"


def _webhook(value: object) -> object:
    if not isinstance(value, str):
        return as_tuple(value)
    if not re.fullmatch(_WEBHOOK, value):  # it is not shown: it may be a secret
        raise ValueError("wanted a command as a list, or a webhook, http(s)://HOST/... in ASCII")
    return (value,)


Notify = Annotated[
    tuple[Text, ...],
    BeforeValidator(_webhook),
    WithJsonSchema({
        "anyOf": [
            {"type": "array", "items": {"type": "string"}},
            {"type": "string", "pattern": _WEBHOOK},
        ]
    }),
]  # fmt: skip


_TORCHRUN_RESERVED = frozenset({
    "nnodes", "nproc-per-node", "max-restarts", "rdzv-backend", "rdzv-endpoint", "rdzv-id",
    "node-rank", "master-addr", "master-port", "standalone", "module", "no-python", "run-path",
    "local-addr",
})  # fmt: skip
"""torchrun options that a spec cannot pass on: hydroslurm sets them, or they have a field."""


def _number_or_gpu(value: object) -> object:
    """T9k writes text; people write a number."""
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or text == "gpu":
        return text
    if not (text.isascii() and text.isdecimal() and len(text) < 5 and int(text) > 0):
        raise ValueError(f"{text[:40]!r} is neither gpu nor a number from 1 to 9999")
    return text


def _not_torchruns(word: str) -> str:
    """Refuse an option that is ours; argparse accepts any unambiguous prefix of one."""
    name = word.lstrip("-").partition("=")[0].replace("_", "-")
    is_prefix = bool(name) and any(one.startswith(name) for one in _TORCHRUN_RESERVED)
    if word in ("-m", "-r") or (word.startswith("--") and is_prefix):
        raise ValueError(
            f"{word[:60]!r} is set by hydroslurm; use minNodes, maxRestarts, procPerNode "
            "or the command instead"
        )
    return word


def _all_free(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_not_torchruns, words))


ProcPerNode = Annotated[
    str,
    BeforeValidator(_number_or_gpu),
    WithJsonSchema({
        "anyOf": [
            {"type": "integer", "minimum": 1},
            {"type": "string", "pattern": "^(gpu|[0-9]+)$"},
        ]
    }),
]  # fmt: skip


class TorchrunConfig(Part):
    """torch's elastic launcher between Slurm and the ranks."""

    enable: bool = False
    """true: one torchrun agent per replica, which starts procPerNode ranks. false: srun starts the
    ranks, and hydroslurm sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Default:
    false."""
    min_nodes: Count | None = None
    """The least number of replicas that may train together. [replicas] Default: all."""
    max_restarts: Whole = 0
    """How often an agent restarts its ranks itself before its replica has failed. [restarts]
    Default: 0."""
    proc_per_node: ProcPerNode = "1"
    """Ranks per replica: a number, or gpu for one per GPU. [ranks per replica] Default: 1."""
    extra_options: Annotated[Words, AfterValidator(_all_free)] = ()
    """More torchrun options, such as [--log-dir, logs]. Those that hydroslurm sets are refused.
    Default: []."""


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
    batch: Batch = "keep_global"
    """What a change of size does to the batches. keep_global: a step has as many samples as with
    max members, in other shares. per_rank: each rank keeps its batch size, and a step has more
    samples or fewer, as always with engine: restart. Default: keep_global."""
    summation: Summation = "all_reduce"
    """How the ranks' gradients are added up, with batch: keep_global. fixed_order: in one order for
    every size, so that losses and weights are bit for bit those of a fixed size; the script goes
    over run.shards(batch). all_reduce: as is fastest. Default: all_reduce."""
    averaging: Averaging | None = None
    """Average the members' weights now and then instead of their gradients in each step: fewer
    bytes, and another training. Default: gradients are summed."""
    lr: LearningRate = "none"
    """How the learning rate follows the size, with batch: per_rank; the script's is that of max
    members. linear: in proportion; sqrt: with the square root. Default: none."""
    lr_warmup_steps: Whole = 0
    """After a change of size the learning rate goes to its new value in so many steps. [steps]
    Default: 0."""
    engine: Literal["auto", "in_place", "restart"] = "auto"
    """How the ranks form a new generation. in_place: in the same processes, which make their
    process groups anew. restart: they save and leave, and torchrun's agents start them again, for
    any script. auto: restart with torchrunConfig.enable and for scripts that shard their model
    (FSDP), else in_place. Default: auto."""
    base: ElasticBase = Field(default_factory=ElasticBase)
    """Where the first min members and the coordinator run. Default: as the others."""
    autoscale: Autoscale | None = None
    """Rules by which the run chooses its size. Default: it has the size that people ask for."""
    exclude_after_failures: Count = 2
    """A node on which so many members have failed gets no more of them. [failures] Default: 2."""

    def of_agents(self) -> Elastic:
        """With the batches of ranks that are started again, unless the spec names others."""
        if "batch" in self.model_fields_set:
            return self
        return self.model_copy(update={"batch": "per_rank"})


# --- a script's options

_FREE_FOR_SCRIPTS = frozenset({"dependency", "gres", "nice", "reservation"})
"""Options without another spelling in ``hydroslurm submit``; a spec has fields for them."""


def _not_submits(name: str) -> str:
    return _not_ours(name, free=_FREE_FOR_SCRIPTS)


ScriptOption = Annotated[OptionName, AfterValidator(_not_submits)]
"""An option of sbatch where a script is submitted, which has fewer fields."""
Gigabytes = Annotated[float, Field(gt=0, le=MOST_BYTES // 2**30, allow_inf_nan=False)]


class _Options(BaseModel):
    """By submitit's names. What is not listed is submitit's to check."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    name: Line | None = None
    partition: SlurmWord | None = None
    account: SlurmWord | None = None
    qos: SlurmWord | None = None
    timeout_min: Count | None = None
    nodes: Count | None = None
    tasks_per_node: TasksPerNode | None = None
    cpus_per_task: CpusPerTask | None = None
    gpus_per_node: Gpus | SlurmWord | None = None
    mem_gb: Gigabytes | None = None
    options: dict[ScriptOption, SbatchValue] | None = None


def check_options(given: Mapping[str, Any], *, spell: Callable[[str], str] = str) -> None:
    """Refuse values that no job can have, which Slurm would take: ``--nodes=-1`` is one node for
    it, and a time limit of 0 minutes none.

    Args:
        given: submitit's name -> value, and ``options``: those of sbatch. None: not given.
        spell: what the user calls the option of that name.

    Raises:
        UsageError: what is wrong with each, in one line.
    """
    try:
        _Options.model_validate(dict(given))
    except ValidationError as error:
        from hydroslurm.jobs.spec.problems import message_of

        wrong = {
            str(one["loc"][0]): message_of(one, one["loc"])
            for one in reversed(error.errors(include_url=False))
        }
        raise UsageError(
            "; ".join(f"{spell(name)}: {message}" for name, message in reversed(wrong.items()))
        ) from None
