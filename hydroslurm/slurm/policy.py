"""What this site does to preempted jobs, and how much time each kind of stop leaves.

Every number is a lower bound: a process that finishes by then is in time. Measured on Slurm
22.05.8, and read in the source of 22.05.8 and 25.11.4, which agree on everything here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from hydroslurm.core.exitcodes import CANCELLED, RUN_AGAIN
from hydroslurm.errors import SlurmError, UsageError
from hydroslurm.slurm.values import Job, Partition, Qos

if TYPE_CHECKING:
    from hydroslurm.slurm.client import SlurmClient
    from hydroslurm.slurm.config import Config

KILL_COMES_EARLY_S = 0.4
"""slurmd sleeps 0.67 s of KillWait and counts it as 1 (_pause_for_job_completion), so SIGKILL
comes 0.33 s before KillWait is over. Measured with 1, 5, 6 and 10 s."""
WARNING_EARLY_S = 60
"""A ``--signal`` warning may come this much earlier than requested, never later."""


class PreemptAction(str, Enum):
    """What a preemption does to a job."""

    NEVER = "never"
    PAUSE = "pause"
    REQUEUE = "requeue"
    CANCEL = "cancel"


_ACTIONS = {
    "SUSPEND": PreemptAction.PAUSE,
    "REQUEUE": PreemptAction.REQUEUE,
    "CANCEL": PreemptAction.CANCEL,
}


class StopReason(str, Enum):
    """Why a job's processes end; it determines how long they have."""

    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    """The job is already pending again: an operator's requeue, or a preemption without grace, which
    only accounting can tell from one."""
    NODE_FAILING = "node_failing"
    ASKED = "asked"
    """A user or a program sent the signal; Slurm would let the job continue."""
    UNKNOWN = "unknown"

    @property
    def requeue(self) -> bool:
        """Whether to ask Slurm to start the job again; "already pending" is success.

        A cancelled job must not be requeued: Slurm would do it while its processes live (measured),
        and override the user.
        """
        return self is not StopReason.CANCELLED

    @property
    def exit_code(self) -> int:
        """The status to exit with once the state is saved."""
        return RUN_AGAIN if self.requeue else CANCELLED


@dataclass(frozen=True)
class TimeLeft:
    """A lower bound on the seconds from the first signal to SIGKILL.

    Attributes:
        why: what the bound is based on, as a sentence.
    """

    seconds: float
    why: str


@dataclass(frozen=True, kw_only=True)
class SitePolicy:
    """What the site does to a job, submitted or planned.

    Attributes:
        action: what a preemption does to it.
        action_why: the setting that determines it.
        gang: gang scheduling preempts, which ignores GraceTime.
        grace_s: GraceTime as configured for this job; applies unless ``gang``.
        grace_why: where that GraceTime is set.
        exempt_s: each start of the job is safe from preemption for this long.
        kill_wait_s: KillWait as slurmd applies it, at least 5.
        may_requeue: whether Slurm will start it again.
        requeue_why: why, or why not.
        left_to_slurm: up to which restart Slurm itself requeues a job that leaves inside its grace,
            and a request of ours would start it once too often; 0: never.
        preemptors: the partitions or QOS that may preempt it; None if unknown.
        unknown: what could not be read, as sentences.
    """

    action: PreemptAction
    action_why: str = ""
    gang: bool = False
    grace_s: int = 0
    grace_why: str = ""
    exempt_s: int = 0
    kill_wait_s: int = 30
    may_requeue: bool = True
    requeue_why: str = ""
    left_to_slurm: int = 0
    preemptors: tuple[str, ...] | None = None
    unknown: tuple[str, ...] = ()

    @property
    def kill_after_s(self) -> float:
        """The least time from the final SIGTERM to SIGKILL."""
        return self.kill_wait_s - KILL_COMES_EARLY_S

    def time_left(self, reason: StopReason, *, warning_s: float = 0.0) -> TimeLeft:
        """The least time that a stop yet to come leaves, from the first signal on.

        Args:
            reason: neither ASKED nor UNKNOWN, after which nothing needs to follow.
            warning_s: the T of ``--signal=X@T``, for TIME_LIMIT; 0 without one.
        """
        wait = f"KillWait={self.kill_wait_s}, of which slurmd uses all but {KILL_COMES_EARLY_S:g} s"
        if reason is StopReason.NODE_FAILING:
            return TimeLeft(0.0, "a node that fails gives no notice")
        if reason is StopReason.TIME_LIMIT and warning_s:
            early = f"--signal comes {warning_s:g} s before the time limit or earlier"
            return TimeLeft(warning_s + self.kill_after_s, f"{early}; {wait}")
        if reason is StopReason.PREEMPTED and self.grace_s and not self.gang:
            # Slurm counts the grace in whole seconds, including the one under way
            seconds = self.grace_s - 1 + self.kill_after_s
            return TimeLeft(seconds, f"{self.grace_why}, then {wait}")
        ignored = f", which ignores {self.grace_why}" if self.grace_s else ""
        causes = {
            StopReason.PREEMPTED: f"gang scheduling preempts here{ignored}"
            if self.gang
            else self.grace_why,
            StopReason.TIME_LIMIT: "SIGTERM comes when the time limit is over",
            StopReason.CANCELLED: "scancel ends the job at once",
            StopReason.REQUEUED: "scontrol requeue ends the job at once",
        }
        return TimeLeft(self.kill_after_s, f"{causes[reason]}; {wait}")


def site_policy(
    config: Config,
    partition: Partition,
    *,
    partitions: tuple[Partition, ...] = (),
    qos: str = "",
    qoses: tuple[Qos, ...] | None = None,
    job: Job | None = None,
) -> SitePolicy:
    """Combine the settings into the policy for one job. Pure.

    Args:
        partition: the job's.
        partitions: all of them, to tell who may preempt; () if unknown.
        qos: the job's, if ``job`` does not say.
        qoses: all of them; None if accounting could not be asked.
        job: None for a planned job.
    """
    may_requeue, requeue_why = _requeue_rule(config, job)
    never = SitePolicy(
        action=PreemptAction.NEVER,
        exempt_s=config.exempt_s,
        kill_wait_s=config.kill_wait_s,
        may_requeue=may_requeue,
        requeue_why=requeue_why,
    )
    if config.preempt_type == "preempt/partition_prio":
        policy = _by_partition(never, config, partition, partitions)
    elif config.preempt_type == "preempt/qos":
        name = job.qos if job is not None and job.qos else qos
        policy = _by_qos(never, config, name, qoses)
    else:
        shown = config.preempt_type or "(none)"
        why = f"PreemptType={shown} of slurm.conf"
        policy = replace(never, action_why=why, preemptors=())
    if policy.action is PreemptAction.REQUEUE and not may_requeue:
        why = f"{policy.action_why}, but {requeue_why}: Slurm kills what it cannot requeue"
        policy = replace(policy, action=PreemptAction.CANCEL, action_why=why)
    gang = config.gang and policy.action is not PreemptAction.NEVER
    return replace(
        policy,
        gang=gang,
        # gang scheduling heeds it since 26.05
        exempt_s=0 if gang and config.version < (26, 5) else policy.exempt_s,
        left_to_slurm=_left_to_slurm(config) if policy.action is PreemptAction.REQUEUE else 0,
    )


def _left_to_slurm(config: Config) -> int:
    """As :attr:`SitePolicy.left_to_slurm`. Since 24.05 Slurm requeues what leaves, but counts it as
    a failed launch and holds the job at the MaxBatchRequeue-th time; our own request does not count
    (seen on 24.11.5 and 26.05.5). Until 25.11 the mark of the grace stays set over our request: the
    next attempt's end is followed by one more start, and counts, too.
    """
    return max(0, config.most_requeues - 2) if (24, 5) <= config.version < (26, 5) else 0


def find_partition(partitions: tuple[Partition, ...], name: str) -> Partition:
    """The partition of this name, or of the first of several names; the default one for "".

    Raises:
        UsageError: no such partition; the message lists those that exist.
    """
    wanted = name.split(",")[0]
    for partition in partitions:
        if partition.name == wanted or (not wanted and partition.is_default):
            return partition
    names = ", ".join(partition.name for partition in partitions) or "none"
    raise UsageError(f"no partition {wanted!r} in this cluster; its partitions: {names}")


class Policies:
    """The site's settings at the moment they were read."""

    def __init__(
        self, config: Config, partitions: tuple[Partition, ...], qoses: tuple[Qos, ...] | None
    ) -> None:
        self._config = config
        self._partitions = partitions
        self._qoses = qoses
        self._known: dict[tuple[object, ...], SitePolicy] = {}

    @classmethod
    def read(cls, client: SlurmClient) -> Policies | None:
        """Two requests to slurmctld, and one to slurmdbd where QOS decide; None where Slurm could
        not be asked."""
        try:
            config = client.config()
            qoses = client.qoses() if config.preempt_type == "preempt/qos" else None
            return cls(config, client.partitions(), qoses)
        except SlurmError:
            return None

    @property
    def kill_after_s(self) -> float:
        """As :attr:`SitePolicy.kill_after_s`, which is the same for all jobs."""
        return self._config.kill_wait_s - KILL_COMES_EARLY_S

    def of(self, job: Job) -> SitePolicy | None:
        """None for a job of a partition that is new since then."""
        kind = (job.partition, job.qos, job.is_batch, job.may_requeue)
        if kind not in self._known:
            try:
                partition = find_partition(self._partitions, job.partition)
            except UsageError:
                return None
            self._known[kind] = site_policy(
                self._config, partition, partitions=self._partitions, qoses=self._qoses, job=job
            )
        return self._known[kind]


def _requeue_rule(config: Config, job: Job | None) -> tuple[bool, str]:
    if job is not None and job.is_batch is False:
        return False, "it was started by srun or salloc, and Slurm requeues batch jobs only"
    if job is not None and job.may_requeue is not None:
        if job.may_requeue:
            return True, "the job may be requeued (Requeue=1)"
        return False, "it was submitted with --no-requeue, or without --requeue under JobRequeue=0"
    if config.job_requeue:
        return True, "JobRequeue=1"
    return False, "JobRequeue=0 and no --requeue"


def _by_partition(
    never: SitePolicy, config: Config, partition: Partition, partitions: tuple[Partition, ...]
) -> SitePolicy:
    name = partition.name
    grace_why = f"GraceTime={partition.grace_time_s} of partition {name}"
    # scontrol and pyslurm print the cluster's mode for a partition without one of its own
    action = _action(partition.preempt_mode)
    why = f"PreemptMode={partition.preempt_mode} of partition {name}"
    if _action(config.preempt_mode) is PreemptAction.NEVER:
        action, why = PreemptAction.NEVER, f"PreemptMode={config.preempt_mode} of slurm.conf"
    preemptors = tuple(
        other.name
        for other in partitions
        if other.priority_tier > partition.priority_tier and set(other.nodes) & set(partition.nodes)
    )
    if partitions and not preemptors:
        action = PreemptAction.NEVER
        why = (
            f"no partition with a higher PriorityTier than {name}'s {partition.priority_tier} "
            "shares its nodes"
        )
    return replace(
        never,
        action=action,
        action_why=why,
        grace_s=partition.grace_time_s,
        grace_why=grace_why,
        preemptors=preemptors if partitions else None,
    )


def _by_qos(
    never: SitePolicy, config: Config, qos: str, qoses: tuple[Qos, ...] | None
) -> SitePolicy:
    cluster = f"PreemptMode={config.preempt_mode} of slurm.conf"
    if _action(config.preempt_mode) is PreemptAction.NEVER:
        return replace(never, action_why=cluster, preemptors=())
    found = next((each for each in qoses or () if each.name == qos), None)
    if found is None:
        why = "accounting could not be asked" if qoses is None else "there is no such QOS"
        return replace(
            never,
            action=_action(config.preempt_mode),
            action_why=cluster,
            grace_why=f"the GraceTime of QOS {qos or '(none)'} is not known, so none is counted on",
            unknown=(f"PreemptMode and GraceTime of QOS {qos or '(none)'}: {why}",),
        )
    own = f"PreemptMode={found.preempt_mode} of QOS {qos}"
    preemptors = tuple(each.name for each in qoses or () if qos in each.preempts)
    nobody = f"no QOS has {qos} in its Preempt list"
    return replace(
        never,
        action=_action(found.preempt_mode or config.preempt_mode)
        if preemptors
        else PreemptAction.NEVER,
        action_why=(own if found.preempt_mode else cluster) if preemptors else nobody,
        grace_s=found.grace_time_s,
        grace_why=f"GraceTime={found.grace_time_s} of QOS {qos}",
        exempt_s=never.exempt_s if found.exempt_s is None else found.exempt_s,
        preemptors=preemptors,
    )


def _action(mode: str) -> PreemptAction:
    """``GANG,SUSPEND`` -> PAUSE. GANG, WITHIN and PRIORITY are not actions."""
    parts = mode.upper().split(",")
    return next((_ACTIONS[part] for part in parts if part in _ACTIONS), PreemptAction.NEVER)
