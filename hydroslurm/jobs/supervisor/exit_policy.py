"""What follows when tasks of an attempt have ended. Pure: statuses in, one judgement out.

The rules are T9k's and Kubeflow's: the end of the master is the job's, a failure is what the
replica's restart policy says. What differs is what a restart is. Ranks that train together cannot
go on when one of them is started anew, so all of them are; it counts as one failure, of the replica
that failed first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from hydroslurm.core.exitcodes import MUST_NOT_RUN_AGAIN, RUN_AGAIN
from hydroslurm.jobs.launch.plan import Plan

RETRYABLE = frozenset({130, 137, 138, 140, 143})
"""Under ExitCode: SIGINT, SIGKILL, SIGUSR1 (T9k's "the user wants it again"), SIGUSR2 (submitit's
default signal) and SIGTERM, as 128 + N."""


class Next(Enum):
    """What to do."""

    WAIT = "wait"
    SUCCEED = "succeed"
    RESTART = "restart"
    FAIL = "fail"
    LEAVE = "leave"
    """Saved, to be requeued."""
    REQUEUE = "requeue"
    """Nothing can be started on these nodes."""


SRUN_KILLED = "SrunKilled"


@dataclass(frozen=True)
class Judgement:
    """What follows, and because of whom.

    Attributes:
        next: what to do.
        replica, status: whose end decided it.
        counts: whether the restart counts against backoffLimit.
        reason, words: for the job's conditions: one word, one sentence.
    """

    next: Next
    replica: str | None = None
    status: int | None = None
    counts: bool = False
    reason: str = ""
    words: str = ""


def judge(plan: Plan, statuses: Mapping[int, int], order: Sequence[int]) -> Judgement:
    """Look at the ends in the order in which they came; the first that decides counts.

    Args:
        plan: what runs.
        statuses: task -> how it has ended; those that run are not in it.
        order: the tasks of ``statuses``, the first to end first.
    """
    saved = [task for task in order if statuses[task] == RUN_AGAIN]
    if saved:  # others may have ended badly because of it
        replica = plan.tasks[saved[0]].replica
        return Judgement(Next.LEAVE, replica, RUN_AGAIN, words=f"{replica} has saved and left")
    for position, task in enumerate(order):
        found = _of_one(plan, task, statuses[task], statuses, order[: position + 1])
        if found is not None:
            return found
    return Judgement(Next.WAIT)


def _of_one(
    plan: Plan, task: int, status: int, statuses: Mapping[int, int], until_now: Sequence[int]
) -> Judgement | None:
    replica = plan.tasks[task].replica
    policy = plan.policy_of(replica)
    is_master = replica == plan.replicas[0]
    if status == MUST_NOT_RUN_AGAIN:
        words = f"{replica} says that it must not be run again (status {status})"
        return Judgement(Next.FAIL, replica, status, reason="MustNotRunAgain", words=words)
    if status == 0:
        own = [number for number, one in enumerate(plan.tasks) if one.replica == replica]
        done = all(number in until_now and statuses[number] == 0 for number in own)
        if not (done and is_master):
            return None
        if policy == "Always":
            words = f"{replica} has ended, and restartPolicy Always starts it again"
            return Judgement(Next.RESTART, replica, 0, True, "Always", words)
        words = f"{replica} has ended with status 0"
        return Judgement(Next.SUCCEED, replica, 0, reason="MasterSucceeded", words=words)
    if restarts(policy, status):
        words = f"{replica} failed with status {status_words(status)}"
        return Judgement(Next.RESTART, replica, status, True, "ReplicaFailed", words)
    if is_master:
        words = (
            f"{replica} failed with status {status_words(status)}, which restartPolicy {policy} "
            "takes for final"
        )
        return Judgement(Next.FAIL, replica, status, reason="MasterFailed", words=words)
    return None


def unasked(plan: Plan, found: Judgement) -> Judgement:
    """What to make of a rank that has left with 75 although nobody asked it to stop: no preemption,
    or the job would go round for ever, but an end like any other, for its policy to judge."""
    assert found.next is Next.LEAVE
    assert found.replica is not None
    policy = plan.policy_of(found.replica)
    words = (
        f"{found.replica} left with status {RUN_AGAIN}, which says that it was stopped and has "
        "saved; nobody has asked it to"
    )
    if restarts(policy, RUN_AGAIN):
        return Judgement(Next.RESTART, found.replica, RUN_AGAIN, True, "StoppedUnasked", words)
    words = f"{words}, and restartPolicy {policy} takes that for final"
    return Judgement(Next.FAIL, found.replica, RUN_AGAIN, reason="StoppedUnasked", words=words)


def srun_was_killed(signal_number: int | None) -> Judgement:
    """srun ended without a word about tasks that it had started: its end ends them, and is none of
    their failures. ``signal_number``: what it died of, where that is known."""
    how = "" if signal_number is None else f" ({status_words(128 + signal_number)})"
    words = f"srun was killed{how}, and its tasks with it; that is no failure of theirs"
    return Judgement(Next.RESTART, reason=SRUN_KILLED, words=words)


def held_back(why: str, waited_s: float) -> Judgement:
    """Slurm makes no job step on nodes that the job has to itself."""
    words = (
        f"no job step could be started for {waited_s:.0f} s ({why}): Slurm counts one that is over "
        "as running, as it does where its slurmstepd was killed"
    )
    return Judgement(Next.REQUEUE, reason="StepCannotStart", words=words)


def restarts(policy: str, status: int) -> bool:
    """Whether a policy starts a replica again that ended so."""
    if policy == "Always":
        return True
    if policy == "OnFailure":
        return status != 0
    return policy == "ExitCode" and status in RETRYABLE


def status_words(status: int) -> str:
    """``137 (SIGKILL)``"""
    import signal

    try:
        return f"{status} ({signal.Signals(status - 128).name})" if status > 128 else str(status)
    except ValueError:
        return str(status)
