"""What this site does to a preempted job, and how long each kind of stop leaves it.

Every number is a lower bound: a process that is done by then is done in time. Measured on 22.05.8,
and read in the source of 22.05.8 and 25.11.4, which do the same in all that is said here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from hydroslurm.errors import UsageError
from hydroslurm.slurm.config import Config, PreemptAction, Rule, rule_for
from hydroslurm.slurm.values import Job, Partition, Qos

LEAST_KILL_WAIT_S = 5
"""slurmd makes at least so much of KillWait (_rpc_terminate_job in req.c)."""
KILL_COMES_EARLY_S = 0.4
"""slurmd sleeps 0.67 s of KillWait and counts it as 1 (_pause_for_job_completion), so that SIGKILL
comes 0.33 s before KillWait is over. Measured with 1, 5, 6 and 10 s."""
WARNING_EARLY_S = 60
"""A ``--signal`` warning may come so much earlier than was asked for, never later."""


class StopKind(str, Enum):
    """What may end a job's processes; it decides how long they have."""

    PREEMPTED = "preempted"
    TIME_LIMIT_WARNED = "time_limit_warned"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    NODE_FAILURE = "node_failure"
    ASKED = "asked"
    """A person's signal to a job that goes on: nobody will kill it for that."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class StopCase:
    """The facts about a stop that decide how much time there is.

    Attributes:
        to_end_s: seconds from the first signal to the job's EndTime, which a preemption with grace
            moves to the end of the grace. None when not known, or in the future.
        warning_s: the T of ``--signal=X@T``, for a warning yet to come.
    """

    kind: StopKind
    to_end_s: float | None = None
    warning_s: float | None = None


@dataclass(frozen=True)
class TimeLeft:
    """A lower bound on the seconds from the first signal to SIGKILL; infinite if none follows.

    Attributes:
        why: the fact it rests on, as a sentence.
    """

    seconds: float
    why: str


@dataclass(frozen=True, kw_only=True)
class SitePolicy:
    """What happens to a job, submitted or planned.

    Attributes:
        action: what a preemption does to it.
        action_why: the setting that says so.
        gang: gang scheduling does it, which ignores GraceTime.
        grace_s: GraceTime as configured for this job; it counts unless ``gang``.
        grace_why: where that GraceTime is set.
        kill_wait_s: KillWait as slurmd takes it, at least 5.
        send_user_signal: the ``--signal`` comes in place of the first SIGTERM of a preemption.
        is_batch: False for what srun or salloc made; None for a job that is planned.
        may_requeue: whether Slurm will start it again.
        requeue_why: why, or why not.
        requeue_wait_s: how long a requeued job waits at least.
        suspend_grace_s: seconds between SIGTSTP and SIGSTOP of a suspend.
        signals_children: a signal reaches every process of a job step, not the srun tasks only.
        preemptors: the partitions or QOS that may preempt it; None when not known.
        unknown: what could not be read, as sentences.
    """

    action: PreemptAction
    action_why: str = ""
    gang: bool = False
    grace_s: int = 0
    grace_why: str = ""
    kill_wait_s: int = 30
    send_user_signal: bool = False
    is_batch: bool | None = None
    may_requeue: bool = True
    requeue_why: str = ""
    requeue_wait_s: int = 121
    suspend_grace_s: int = 2
    signals_children: bool = True
    preemptors: tuple[str, ...] | None = None
    unknown: tuple[str, ...] = ()

    @property
    def kill_after_s(self) -> float:
        """At least so long from the SIGTERM that begins the end to SIGKILL."""
        return kill_after_s(self.kill_wait_s)

    def time_left_s(self, stop: StopCase) -> TimeLeft:
        """At least how long the processes have, counted from their first signal."""
        wait = f"KillWait={self.kill_wait_s}, of which slurmd uses all but {KILL_COMES_EARLY_S:g} s"
        if stop.kind is StopKind.PREEMPTED:
            return self._preempted(stop, wait)
        if stop.kind is StopKind.TIME_LIMIT_WARNED:
            return self._warned(stop, wait)
        if stop.kind is StopKind.NODE_FAILURE:
            return TimeLeft(0.0, "a node that fails gives no notice")
        if stop.kind is StopKind.ASKED:
            if stop.to_end_s is None:
                return TimeLeft(math.inf, "a signal from a person: the job goes on")
            seconds = max(0.0, stop.to_end_s + self.kill_after_s)
            return TimeLeft(seconds, "a signal from a person: the job goes on to its time limit")
        causes = {
            StopKind.TIME_LIMIT: "SIGTERM comes when the time limit is over",
            StopKind.CANCELLED: "scancel ends the job at once",
            StopKind.REQUEUED: "scontrol requeue ends the job at once",
            StopKind.UNKNOWN: "the least time that any stop leaves",
        }
        return TimeLeft(self.kill_after_s, f"{causes[stop.kind]}; {wait}")

    def _preempted(self, stop: StopCase, wait: str) -> TimeLeft:
        if stop.to_end_s is not None:
            seconds = max(0.0, stop.to_end_s + self.kill_after_s)
            ends = "the job's EndTime, which is that of its grace" if stop.to_end_s else "at once"
            return TimeLeft(seconds, f"{ends}, then {wait}")
        if self.gang:
            heed = f", which ignores {self.grace_why}" if self.grace_s else ""
            return TimeLeft(self.kill_after_s, f"gang scheduling preempts here{heed}; {wait}")
        if not self.grace_s:
            return TimeLeft(self.kill_after_s, f"{self.grace_why}; {wait}")
        # Slurm counts the grace in whole seconds from the one that has begun
        seconds = self.grace_s - 1 + self.kill_after_s
        return TimeLeft(seconds, f"{self.grace_why}, then {wait}")

    def _warned(self, stop: StopCase, wait: str) -> TimeLeft:
        if stop.to_end_s is not None:
            seconds = max(0.0, stop.to_end_s + self.kill_after_s)
            return TimeLeft(seconds, f"the job's EndTime, then {wait}")
        if stop.warning_s is None:
            return TimeLeft(self.kill_after_s, f"no warning is asked for; {wait}")
        seconds = stop.warning_s + self.kill_after_s
        return TimeLeft(
            seconds, f"--signal comes {stop.warning_s:g} s before the time limit or earlier; {wait}"
        )


def kill_after_s(kill_wait_s: int) -> float:
    """What slurmd makes of KillWait."""
    return max(kill_wait_s, LEAST_KILL_WAIT_S) - KILL_COMES_EARLY_S


def site_policy(
    config: Config,
    partition: Partition,
    *,
    partitions: tuple[Partition, ...] = (),
    qos: str = "",
    qoses: tuple[Qos, ...] | None = None,
    job: Job | None = None,
) -> SitePolicy:
    """Combine the settings into what they mean for one job. Pure.

    Args:
        partition: the job's.
        partitions: all there are, to tell who may preempt; () when not known.
        qos: the job's, where ``job`` does not say.
        qoses: all there are; None when accounting could not be asked.
        job: None for one that is planned.
    """
    name = job.qos if job is not None and job.qos else qos
    rule = rule_for(config, partition, partitions=partitions, qos=name, qoses=qoses)
    may_requeue, requeue_why = _requeue_rule(config, job)
    action, why = rule.action, rule.action_why
    if action is PreemptAction.REQUEUE and not may_requeue:
        action = PreemptAction.CANCEL
        why = f"{why}, but {requeue_why}: Slurm kills what it cannot requeue"
    return SitePolicy(
        action=action,
        action_why=why,
        gang=config.gang and action is not PreemptAction.NEVER,
        grace_s=rule.grace_s,
        grace_why=rule.grace_why,
        kill_wait_s=max(config.kill_wait_s, LEAST_KILL_WAIT_S),
        send_user_signal=config.send_user_signal,
        is_batch=None if job is None else job.is_batch,
        may_requeue=may_requeue,
        requeue_why=requeue_why,
        requeue_wait_s=config.requeue_wait_s,
        suspend_grace_s=config.suspend_grace_time_s,
        signals_children=config.signals_children,
        preemptors=rule.preemptors,
        unknown=rule.unknown,
    )


def find_partition(partitions: tuple[Partition, ...], name: str) -> Partition:
    """The partition of that name, or the first of several; the default one for "".

    Raises:
        UsageError: there is none; the message names those there are.
    """
    wanted = name.split(",")[0]
    for partition in partitions:
        if partition.name == wanted or (not wanted and partition.is_default):
            return partition
    names = ", ".join(partition.name for partition in partitions) or "none"
    raise UsageError(f"no partition {wanted!r} in this cluster; there are: {names}")


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


__all__ = [
    "PreemptAction",
    "Rule",
    "SitePolicy",
    "StopCase",
    "StopKind",
    "TimeLeft",
    "find_partition",
    "kill_after_s",
    "site_policy",
]
