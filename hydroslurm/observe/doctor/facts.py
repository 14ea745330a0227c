"""Facts for a diagnosis, and its findings: frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hydroslurm.observe.doctor.script import ScriptOptions
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.policy import PreemptAction, SitePolicy, StopReason, TimeLeft
from hydroslurm.slurm.values import Job, Partition
from hydroslurm.training.cadence import Cadence


@dataclass(frozen=True, kw_only=True)
class SaveFacts:
    """How long a save takes.

    Attributes:
        save_s: from the start of a save to its commit.
        source: where the figure comes from, in words.
        cadence: how often the run saved when it wrote that checkpoint.
    """

    save_s: float
    state_bytes: int | None = None
    source: str = "--save-s"
    cadence: Cadence | None = None


@dataclass(frozen=True, kw_only=True)
class VacateFacts:
    """The slowest vacate of a run.

    Attributes:
        device_bytes: moved by a rank.
        source: where the figures come from, in words.
    """

    device_bytes: int
    bytes_per_s: float
    source: str


class Saver(str, Enum):
    """What would save this job at a stop, according to its run folder."""

    UNKNOWN = "unknown"
    """The job is planned or pending, or its run folder cannot be read."""
    RUN = "run"
    TWO_CALLS = "two_calls"
    """``receive_suspend_command`` and ``go_suspend``."""
    NO_RUN = "no_run"
    """Its ranks use hydroslurm, but have not created a Run yet."""
    NOBODY = "nobody"
    """It is running, and none of its ranks has reported."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything known about a job, existing or planned.

    Attributes:
        qos: empty for none.
        job: None for a planned one.
        script: options of its batch script; None without a script that can be read.
        save: None if it is not known how long a save takes.
        suspend_s: the longest suspend that the job has to survive; None if unknown.
        untrusted: why jobs would not trust the run folder; empty if they do.
        shared: who besides its user could swap the run folder; empty for nobody.
        saver: what would save at a stop.
        vacate: how quickly its ranks have vacated; None if none has.
        no_vacate: why this node cannot vacate; empty if it can, or if it was not asked.
        no_munge: why MUNGE gives ranks no key on this machine; empty if it does, None if it was
            not asked.
    """

    config: Config
    policy: SitePolicy
    partition: Partition
    qos: str = ""
    job: Job | None = None
    script: ScriptOptions | None = None
    save: SaveFacts | None = None
    suspend_s: float | None = None
    untrusted: str = ""
    shared: str = ""
    no_munge: str | None = None
    saver: Saver = Saver.UNKNOWN
    vacate: VacateFacts | None = None
    no_vacate: str = ""

    @property
    def tasks(self) -> int:
        """Number of tasks, according to Slurm and the script."""
        n_tasks = self.job.n_tasks if self.job else None
        return max(n_tasks or 1, self.script.tasks if self.script else 1)

    @property
    def memory_per_node_bytes(self) -> int | None:
        """Memory requested per node; None if unknown."""
        job = self.job
        if job is None or job.memory_per_node_bytes:
            return job.memory_per_node_bytes if job else None
        if job.memory_per_cpu_bytes and job.n_cpus and job.n_nodes:
            return job.memory_per_cpu_bytes * job.n_cpus // job.n_nodes
        return None

    @property
    def is_preempted_to_stop(self) -> bool:
        """Whether a preemption ends the processes instead of pausing them."""
        return self.policy.action in (PreemptAction.REQUEUE, PreemptAction.CANCEL)

    @property
    def has_time_limit(self) -> bool:
        """True for a planned job: DefaultTime or --time may set one."""
        if self.job is None:
            return True
        return self.job.end_epoch_s is not None or self.job.time_limit_s is not None

    def stops(self) -> tuple[tuple[StopReason, TimeLeft], ...]:
        """Each stop that can happen here and the time it leaves, in the report's order."""
        script = self.script
        warns = script is not None and script.saves_at_warning
        warning_s = script.warning.before_s if warns and script and script.warning else 0.0
        reasons = [StopReason.PREEMPTED] if self.is_preempted_to_stop else []
        reasons += [StopReason.TIME_LIMIT] if self.has_time_limit else []
        reasons += [StopReason.REQUEUED, StopReason.CANCELLED, StopReason.NODE_FAILING]
        return tuple((r, self.policy.time_left(r, warning_s=warning_s)) for r in reasons)


class Severity(str, Enum):
    """How bad it is; ``loss``: training steps would be lost."""

    OK = "ok"
    NOTE = "note"
    RISK = "risk"
    LOSS = "loss"


@dataclass(frozen=True)
class Finding:
    """One thing that users have to know.

    Attributes:
        key: identifies the finding; stable across releases.
        title: a few words.
        explanation: a sentence or two.
        fix: the setting, sbatch option or command that would change it; empty for none.
    """

    key: str
    severity: Severity
    title: str
    explanation: str
    fix: str = ""
