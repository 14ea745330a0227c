"""The frozen values that Slurm's answers become: durations in seconds, moments in epoch seconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hydroslurm.core.jobid import JobId


class JobState(str, Enum):
    """What a job does now, in the words of squeue's long form.

    Slurm keeps a base state (PENDING to OUT_OF_MEMORY) and flags beside it, and shows one word: the
    flag with the highest rank, else the base state. The members stand in that order. All the words
    that Slurm told are in ``Job.flags``.
    """

    COMPLETING = "COMPLETING"
    STAGE_OUT = "STAGE_OUT"
    CONFIGURING = "CONFIGURING"
    EXPEDITING = "EXPEDITING"
    RESIZING = "RESIZING"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    STOPPED = "STOPPED"
    REVOKED = "REVOKED"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    POWER_UP_NODE = "POWER_UP_NODE"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    UNKNOWN = "UNKNOWN"
    """A word of a newer Slurm; it stands in ``Job.flags``."""

    @property
    def has_ended(self) -> bool:
        """True when nothing of the job runs and it will not start again by itself."""
        return self in _ENDED

    @property
    def is_waiting(self) -> bool:
        """True when the job waits to start, requeued and held jobs included."""
        return self in _WAITING


_ENDED = frozenset(
    {
        JobState.COMPLETED,
        JobState.CANCELLED,
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.PREEMPTED,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
        JobState.OUT_OF_MEMORY,
        JobState.REVOKED,
    }
)
_WAITING = frozenset(
    {
        JobState.PENDING,
        JobState.REQUEUED,
        JobState.REQUEUE_FED,
        JobState.REQUEUE_HOLD,
        JobState.SPECIAL_EXIT,
        JobState.RESV_DEL_HOLD,
    }
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job as Slurm described it at one moment. ``None`` where Slurm did not say.

    Attributes:
        job_id: its own number, the SLURM_JOB_ID of its processes; :attr:`id` is its name.
        state: what squeue shows.
        flags: every word that Slurm gave for the state, ``state`` included.
        reason: why it waits or why it ended, ``"None"`` when neither.
        nodes: allocated nodes, expanded; empty while it waits.
        node_list: the same as Slurm writes it, ``n[1-3,7]``.
        excluded_nodes: on which it must not start, as Slurm writes them.
        time_limit_s: None when unlimited, or when the partition's limit applies.
        end_epoch_s: when it ended; of a running job, when its time limit will end it.
        restart_count: how often it was requeued.
        preempt_epoch_s: when it was told that it is being preempted; None before.
        suspend_epoch_s: when it was last suspended or resumed.
        suspended_s: how long it was suspended in this attempt; only accounting (``history``) knows.
        std_out, std_err: with ``%j`` and the like filled in as far as Slurm does that; both name
            one file where stderr has none of its own.
        exit_code: of the batch script or of srun. A code of 128 and more has lost 128, so that 143
            and 15 both read 15: pyslurm and sacct of 22.05 tell no more, and one meaning for all
            backends and for accounting is worth more than the bit.
        array_job_id, array_task_id: None outside of an array. The record that stands for the tasks
            which have not started has no array_task_id, and ``array_tasks`` instead (``2-9%1``).
        het_job_id, het_component: of a component of a heterogeneous job, its leader's number and
            the place in it.
        is_batch: False for what srun or salloc started; those cannot be requeued.
        may_requeue: False for ``--no-requeue``.
        memory_per_node_bytes, memory_per_cpu_bytes: asked for; None when nothing was.
        qos: empty on a cluster without accounting.
        gres: generic resources asked for, ``gpu:2``, whatever option they were asked for with.
        cancelled_by_uid: who cancelled it; only accounting (``history``) knows.
    """

    job_id: int
    state: JobState
    flags: frozenset[str] = frozenset()
    name: str = ""
    user: str = ""
    partition: str = ""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    node_list: str = ""
    excluded_nodes: str = ""
    n_nodes: int | None = None
    n_tasks: int | None = None
    n_cpus: int | None = None
    submit_epoch_s: int | None = None
    eligible_epoch_s: int | None = None
    start_epoch_s: int | None = None
    end_epoch_s: int | None = None
    time_limit_s: int | None = None
    restart_count: int = 0
    preempt_epoch_s: int | None = None
    suspend_epoch_s: int | None = None
    suspended_s: int | None = None
    work_dir: str = ""
    std_out: str = ""
    std_err: str = ""
    comment: str = ""
    exit_code: int | None = None
    array_job_id: int | None = None
    array_task_id: int | None = None
    array_tasks: str = ""
    het_job_id: int | None = None
    het_component: int | None = None
    is_batch: bool | None = None
    may_requeue: bool | None = None
    memory_per_node_bytes: int | None = None
    memory_per_cpu_bytes: int | None = None
    qos: str = ""
    gres: str = ""
    cancelled_by_uid: int | None = None

    @property
    def id(self) -> JobId:
        """What Slurm calls it, and what names it, and no other job, to Slurm's programs."""
        if self.array_job_id is not None:
            alone = self.array_tasks.partition("%")[0]  # 26.05: 44_[2%1], the last one that waits
            task = int(alone) if alone.isdecimal() else self.array_task_id
            return JobId(self.array_job_id, task, "" if task is not None else self.array_tasks)
        if self.het_job_id is not None:
            return JobId(self.het_job_id, component=self.het_component)
        return JobId(self.job_id)

    def is_named(self, job_id: JobId) -> bool:
        """Whether an id means this job, or several of which it is one; a bare number is a job's
        own, an array's, or that of a heterogeneous job."""
        if job_id == JobId(job_id.number):
            return job_id.number in (self.job_id, self.array_job_id, self.het_job_id)
        return job_id.common(self.id) is not None


@dataclass(frozen=True, kw_only=True)
class Element:
    """One element of a job array, as a line of squeue tells it.

    Attributes:
        name: as squeue shows it, ``123_4``.
        node: where it runs or ran; "" while it waits.
    """

    name: str
    state: JobState
    node: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One partition.

    Attributes:
        state: ``UP``, ``DOWN``, ``DRAIN`` or ``INACTIVE``.
        preempt_mode: as Slurm prints it, ``OFF``, ``SUSPEND``, ``REQUEUE``, ``CANCEL`` ...
        grace_time_s: the least time between a preempted job's SIGTERM and its SIGKILL.
        max_time_s: None when unlimited.
    """

    name: str
    state: str = "UP"
    priority_tier: int = 1
    preempt_mode: str = "OFF"
    grace_time_s: int = 0
    nodes: tuple[str, ...] = ()
    max_time_s: int | None = None
    is_default: bool = False


@dataclass(frozen=True, kw_only=True)
class Qos:
    """One quality of service, from accounting; it decides where PreemptType=preempt/qos.

    Attributes:
        grace_time_s: as a partition's, for the jobs of this QOS.
        preempt_mode: ``REQUEUE``, ``CANCEL`` ...; empty: as cluster-wide.
        preempts: the names of those whose jobs this one's may preempt.
        exempt_s: how long each start of a job is safe from preemption; None: as cluster-wide.
    """

    name: str
    grace_time_s: int = 0
    preempt_mode: str = ""
    preempts: tuple[str, ...] = ()
    exempt_s: int | None = None
