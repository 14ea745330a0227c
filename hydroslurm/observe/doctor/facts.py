"""The facts that a diagnosis rests on, and the findings it is made of: frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hydroslurm.observe.doctor.script import ScriptOptions
from hydroslurm.slurm.config import Config, PreemptAction
from hydroslurm.slurm.policy import SitePolicy, StopCase, StopKind, TimeLeft
from hydroslurm.slurm.values import Job, Partition


@dataclass(frozen=True, kw_only=True)
class SaveFacts:
    """How long a save takes.

    Attributes:
        save_s: of one whole save, until it is committed.
        source: where the figure is from, in words.
    """

    save_s: float
    state_bytes: int | None = None
    source: str = "--save-s"


class Saver(str, Enum):
    """Who would save at a stop of this job, as far as its run folder tells."""

    UNKNOWN = "unknown"
    """A job that is planned or waits, or a run folder that cannot be read."""
    RUN = "run"
    TWO_CALLS = "two_calls"
    """``receive_suspend_command`` and ``go_suspend``."""
    NO_RUN = "no_run"
    """hydroslurm is in its ranks, which have made no Run so far."""
    NOBODY = "nobody"
    """It runs, and no rank of it has announced itself."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that is known of one job, or of one that is planned.

    Attributes:
        qos: that was looked at; empty for none.
        job: None when it is planned.
        script: its batch script's options; None where there is no script or it may not be read.
        save: None when it is not known how long a save takes.
        suspend_s: how long a suspend is to be survived; None when nobody said.
        untrusted: why a job would not obey what lies in the run folder; empty where it would.
        shared: who else than its user could exchange the run folder; empty for nobody.
        saver: who would save at a stop.
        no_munge: why MUNGE gives ranks no key on this machine; empty where it does, None where it
            was not asked.
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

    @property
    def tasks(self) -> int:
        """How many tasks the job has, as far as Slurm or its script tell."""
        told = self.job.n_tasks if self.job else None
        return max(told or 1, self.script.tasks if self.script else 1)

    @property
    def memory_per_node_bytes(self) -> int | None:
        """What the job has asked for on each node; None where that is not known."""
        job = self.job
        if job is None or job.memory_per_node_bytes:
            return job.memory_per_node_bytes if job else None
        if job.memory_per_cpu_bytes and job.n_cpus and job.n_nodes:
            return job.memory_per_cpu_bytes * job.n_cpus // job.n_nodes
        return None

    @property
    def is_preempted_to_stop(self) -> bool:
        """Whether a preemption ends the processes, rather than pausing them."""
        return self.policy.action in (PreemptAction.REQUEUE, PreemptAction.CANCEL)

    @property
    def has_time_limit(self) -> bool:
        """True for a planned job: what DefaultTime or --time will give it is not known here."""
        if self.job is None:
            return True
        return self.job.end_epoch_s is not None or self.job.time_limit_s is not None

    def stops(self) -> tuple[tuple[StopKind, TimeLeft], ...]:
        """Every kind of stop that can happen here, with the time that it leaves, in the order of a
        report."""
        warning_s = self.script.warning_s if self.script else None
        cases = [StopCase(kind=StopKind.PREEMPTED)] if self.is_preempted_to_stop else []
        if self.has_time_limit:
            warned = StopCase(kind=StopKind.TIME_LIMIT_WARNED, warning_s=warning_s)
            cases.append(warned if warning_s else StopCase(kind=StopKind.TIME_LIMIT))
        cases += [
            StopCase(kind=kind)
            for kind in (StopKind.REQUEUED, StopKind.CANCELLED, StopKind.NODE_FAILURE)
        ]
        return tuple((case.kind, self.policy.time_left_s(case)) for case in cases)


class Severity(str, Enum):
    """How bad it is: ``loss`` means that training steps would be lost here."""

    OK = "ok"
    NOTE = "note"
    RISK = "risk"
    LOSS = "loss"


@dataclass(frozen=True)
class Finding:
    """One thing that a person has to know.

    Attributes:
        key: names the finding to programs; stays the same over releases.
        title: a few words. explanation: a sentence or two.
        fix: the line of slurm.conf, sbatch or a command that would change it; empty for none.
    """

    key: str
    severity: Severity
    title: str
    explanation: str
    fix: str = ""
