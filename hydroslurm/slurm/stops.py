"""Why a job was stopped: asked of Slurm, never guessed from the signal.

What 22.05.8 shows while a rank is still alive:

    preempted, in its grace   RUNNING, PreemptTime set, EndTime moved to the end of the grace
    time limit over           COMPLETING, Reason=TimeLimit
    scancel                   COMPLETING, EndTime now
    requeued                  COMPLETING, one restart more, EndTime unknown or a time limit away
    a person's signal         RUNNING, as before

"Requeued" is by an operator, by gang scheduling, or at the end of a grace. slurmctld does not tell
which any more, and accounting does: PREEMPTED or REQUEUED. What a rank has to do is the same, so it
does not ask: where a thousand jobs are preempted without grace, a thousand would, at one moment.
Accounting is asked who cancelled, and whether that was a preemption after all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from enum import Enum

from hydroslurm.core.exitcodes import CANCELLED, RUN_AGAIN
from hydroslurm.errors import SlurmError
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.policy import WARNING_EARLY_S, StopCase, StopKind
from hydroslurm.slurm.refusals import RetryPolicy
from hydroslurm.slurm.values import Job, JobState

IN_GRACE = RetryPolicy(
    call_timeout_s=5.0, give_up_after_s=1.5, first_delay_s=0.1, longest_delay_s=0.5
)
"""For the client that asks inside the grace, where every second is one less for the save."""
USUAL_WARNING_S = 120.0
"""A warning that asks for more than this before the time limit has to be named to be recognised."""


class StopReason(str, Enum):
    """Why a rank was told to stop."""

    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    """The job is in the queue again already: an operator's requeue, or a preemption without grace,
    which only accounting can tell from one."""
    NODE_FAILING = "node_failing"
    ASKED = "asked"
    """A person or a program sent the signal; Slurm would let the job go on."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Stop(StopCase):
    """Why, and what is known of the time left (see :class:`StopCase`).

    Attributes:
        message: one sentence for a person.
        by_uid: who cancelled it, where accounting told.
        pending_again: Slurm has put the job back into the queue already.
        needs_history: accounting may know better, and was not asked or did not answer.
        job: as slurmctld described it; None where it could not be asked.
    """

    reason: StopReason
    message: str
    by_uid: int | None = None
    pending_again: bool = False
    needs_history: bool = False
    job: Job | None = None


@dataclass(frozen=True)
class FollowUp:
    """What happens after a stop, once the state is committed.

    Attributes:
        requeue: ask Slurm to start the job again; "already pending" is success.
        exit_code: to leave with when all went well.
        message: the same, for a person.
    """

    requeue: bool
    exit_code: int
    message: str


_FOLLOW_UPS = {
    StopReason.PREEMPTED: FollowUp(True, RUN_AGAIN, "save, requeue, leave"),
    StopReason.TIME_LIMIT: FollowUp(True, RUN_AGAIN, "save, requeue, leave"),
    StopReason.ASKED: FollowUp(True, RUN_AGAIN, "save, requeue, leave"),
    StopReason.UNKNOWN: FollowUp(True, RUN_AGAIN, "save, requeue, leave"),
    StopReason.CANCELLED: FollowUp(False, CANCELLED, "save, leave; the job is not started again"),
    StopReason.REQUEUED: FollowUp(True, RUN_AGAIN, "save, leave; the job is pending already"),
    StopReason.NODE_FAILING: FollowUp(True, RUN_AGAIN, "save if possible, requeue, leave"),
}


def follow_up(reason: StopReason) -> FollowUp:
    """What comes after the save.

    A cancelled job must not be requeued: Slurm would do it, as long as the job's processes live
    (measured), and undo what a person asked for.
    """
    return _FOLLOW_UPS[reason]


def ask_why(
    client: SlurmClient,
    job_id: int,
    *,
    warning_s: float | None = None,
    history_within_s: float = 1.0,
) -> Stop:
    """Ask Slurm why this job was just told to stop. Never raises for Slurm's sake.

    Args:
        client: with :data:`IN_GRACE` for its retry policy; another one may use up the grace.
        warning_s: the T of ``--signal=X@T``, if it is known.
        history_within_s: how long accounting may take to hear of it; it is asked only where
            slurmctld leaves something open.
    """
    asked_epoch_s = time.time()
    try:
        job = client.job(job_id)
    except SlurmError as error:
        message = f"Slurm could not be asked why: {error}"
        return Stop(kind=StopKind.UNKNOWN, reason=StopReason.UNKNOWN, message=message)
    stop = why_stopped(job, now_epoch_s=asked_epoch_s, warning_s=warning_s)
    deadline_s = time.monotonic() + history_within_s
    while stop.needs_history:
        attempt = _last_attempt(client, job_id)
        if attempt is not None:
            stop = why_stopped(job, now_epoch_s=asked_epoch_s, attempt=attempt, warning_s=warning_s)
        if not stop.needs_history or time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    return replace(stop, job=job)


def why_stopped(
    job: Job, *, now_epoch_s: float, attempt: Job | None = None, warning_s: float | None = None
) -> Stop:
    """Read the reason out of what Slurm says. Pure.

    Args:
        job: as slurmctld described it after the signal.
        now_epoch_s: when that was, which is taken for the moment of the signal.
        attempt: the job's last attempt as accounting has it; None when that is not known.
        warning_s: the T of ``--signal=X@T``, if it is known.
    """
    to_end_s = None if job.end_epoch_s is None else job.end_epoch_s - now_epoch_s
    if job.state in (JobState.RUNNING, JobState.SUSPENDED, JobState.SIGNALING):
        return _why_running(job, to_end_s, warning_s)
    # the processes are being ended: what counts is the state below COMPLETING
    told = {job.state, *(JobState[word] for word in job.flags if word in JobState.__members__)}
    if attempt is not None:
        told.add(attempt.state)
    if JobState.CANCELLED in told:
        by_uid = attempt.cancelled_by_uid if attempt else None
        who = "" if by_uid is None else f" by user id {by_uid}"
        return _ending(StopReason.CANCELLED, f"cancelled{who}", by_uid=by_uid)
    if JobState.PREEMPTED in told or job.preempt_epoch_s is not None:
        # it may have been cancelled in its grace: then it shows a PreemptTime too
        doubtful = attempt is None and not is_pending(job)
        return _ending(
            StopReason.PREEMPTED,
            "preempted",
            pending_again=is_pending(job),
            needs_history=doubtful,
        )
    if job.reason == "TimeLimit" or {JobState.TIMEOUT, JobState.DEADLINE} & told:
        return _ending(StopReason.TIME_LIMIT, "its time limit is over")
    if {JobState.NODE_FAIL, JobState.BOOT_FAIL} & told or job.reason == "NodeDown":
        pending = is_pending(job)
        return _ending(StopReason.NODE_FAILING, "a node of the job failed", pending_again=pending)
    if is_pending(job):
        by_hand = JobState.REQUEUED in told and attempt is not None
        message = "requeued by hand" if by_hand else "requeued, by hand or by a preemption"
        return _ending(StopReason.REQUEUED, message, pending_again=True)
    message = "it is being ended and is not requeued: cancelled, or its batch script has ended"
    return _ending(StopReason.CANCELLED, message, needs_history=attempt is None)


def _why_running(job: Job, to_end_s: float | None, warning_s: float | None) -> Stop:
    if job.preempt_epoch_s is not None:
        message = f"preempted, with a grace that ends in {to_end_s or 0:.0f} s"
        return Stop(
            kind=StopKind.PREEMPTED,
            reason=StopReason.PREEMPTED,
            message=message,
            # no EndTime: nothing is known of the grace
            to_end_s=0.0 if to_end_s is None else to_end_s,
        )
    near_s = (USUAL_WARNING_S if warning_s is None else warning_s) + WARNING_EARLY_S
    if to_end_s is not None and to_end_s <= near_s:
        message = f"its time limit ends it in {max(0.0, to_end_s):.0f} s"
        return Stop(
            kind=StopKind.TIME_LIMIT_WARNED,
            reason=StopReason.TIME_LIMIT,
            message=message,
            to_end_s=to_end_s,
        )
    return Stop(
        kind=StopKind.ASKED,
        reason=StopReason.ASKED,
        message="a person or a program sent it: the job is not preempted, and its time limit is "
        "not near",
        to_end_s=to_end_s,
    )


_KINDS = {
    StopReason.PREEMPTED: StopKind.PREEMPTED,
    StopReason.TIME_LIMIT: StopKind.TIME_LIMIT,
    StopReason.CANCELLED: StopKind.CANCELLED,
    StopReason.REQUEUED: StopKind.REQUEUED,
    StopReason.NODE_FAILING: StopKind.UNKNOWN,
}


def _ending(
    reason: StopReason,
    message: str,
    *,
    by_uid: int | None = None,
    pending_again: bool = False,
    needs_history: bool = False,
) -> Stop:
    """A stop that Slurm has begun already: KillWait is all that is left."""
    return Stop(
        kind=_KINDS[reason],
        reason=reason,
        message=message,
        to_end_s=0.0,
        by_uid=by_uid,
        pending_again=pending_again,
        needs_history=needs_history,
    )


def is_pending(job: Job) -> bool:
    """Whether the job has been put back into the queue. While its processes are being ended it
    shows COMPLETING, and then its times tell: Slurm computes an EndTime for its next attempt, a
    whole time limit after a start, or has none. That of an ended job is when it was ended. (The
    number of restarts would tell only somebody who knows what it was.)"""
    if job.state.is_waiting or "PENDING" in job.flags:
        return True
    if job.state is not JobState.COMPLETING:
        return False
    if job.end_epoch_s is None or job.start_epoch_s is None:
        return True
    limit_s = job.time_limit_s
    return limit_s is not None and job.end_epoch_s - job.start_epoch_s >= limit_s


def _last_attempt(client: SlurmClient, job_id: int) -> Job | None:
    """The attempt that has just ended, as accounting has it; None when it does not know yet."""
    try:
        attempts = client.history(job_id)
    except SlurmError:
        return None
    # the record of an attempt that has only just begun may still say PENDING, with a start
    started = [attempt for attempt in attempts if attempt.start_epoch_s is not None]
    if not started or started[-1].state in (JobState.RUNNING, JobState.PENDING):
        return None
    return started[-1]
