"""What to do when tasks of an attempt have ended. Pure: statuses in, one decision out.

The rules are T9k's and Kubeflow's: the job ends with its master, and a replica's restart policy
says what its failure means. The difference is the restart: ranks that train together cannot go on
when one of them starts anew, so all of them are restarted. That counts as one failure, of the
replica that failed first. Once backoffLimit is spent nothing is restarted, as under Never.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from hydroslurm.core.exitcodes import MUST_NOT_RUN_AGAIN, RUN_AGAIN
from hydroslurm.jobs.plan import Plan, RunLimits

RETRYABLE = frozenset({130, 137, 138, 140, 143})
"""Under ExitCode: SIGINT, SIGKILL, SIGUSR1 (T9k's "the user wants it again"), SIGUSR2 (submitit's
default signal) and SIGTERM, as 128 + N."""


class Action(str, Enum):
    """What to do."""

    WAIT = "wait"
    SUCCEED = "succeed"
    RESTART = "restart"
    FAIL = "fail"
    LEAVE = "leave"
    """Saved; requeue the job."""
    REQUEUE = "requeue"
    """Nothing can be started on these nodes; requeue the job."""


SRUN_KILLED = "SrunKilled"
DEADLINE_EXCEEDED = "DeadlineExceeded"


@dataclass(frozen=True)
class ExitDecision:
    """What to do, and because of which replica.

    Attributes:
        action: what to do.
        replica, status: whose exit decided it.
        counts: whether the restart counts against backoffLimit.
        reason, message: for the job's conditions: one word, one sentence.
        failed_on: nodes where it failed by itself while others ran.
        cause: why that is plainly the nodes' fault; "" where it may be the script's.
    """

    action: Action
    replica: str | None = None
    status: int | None = None
    counts: bool = False
    reason: str = ""
    message: str = ""
    failed_on: tuple[str, ...] = ()
    cause: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the job has ended with it."""
        return self.action in (Action.SUCCEED, Action.FAIL)


def decide_exit(
    plan: Plan,
    statuses: Mapping[int, int],
    *,
    earlier_restarts: int,
    unrequested: Collection[int] = (),
) -> ExitDecision:
    """Go through the exits in the order in which they came; the first that decides counts.

    Args:
        plan: what runs.
        statuses: task -> exit status, of those that have ended; the first to end first.
        earlier_restarts: of this job, compared with backoffLimit.
        unrequested: tasks that exited with 75 although nobody had asked them to stop. As a
            preemption that would be requeued for ever, so it is an exit like any other.
    """
    saved = [
        task for task, status in statuses.items() if status == RUN_AGAIN and task not in unrequested
    ]
    if saved:  # others may have ended badly because of it
        replica = plan.tasks[saved[0]].replica
        return ExitDecision(
            Action.LEAVE, replica, RUN_AGAIN, message=f"{replica} has saved and left"
        )
    is_spent = earlier_restarts >= plan.limits.backoff_limit
    until_now: dict[int, int] = {}
    for task, status in statuses.items():
        until_now[task] = status
        found = _of_one(plan, task, until_now, is_spent=is_spent)
        if found is not None:
            return found
    return ExitDecision(Action.WAIT)


def _of_one(
    plan: Plan, task: int, until_now: Mapping[int, int], *, is_spent: bool
) -> ExitDecision | None:
    """What the last of the exits until now decides. A worker that is not restarted decides nothing:
    the job goes on until its master ends."""
    replica, status = plan.tasks[task].replica, until_now[task]
    policy = plan.tasks[task].restart_policy
    is_master = replica == plan.replicas[0]
    if status == MUST_NOT_RUN_AGAIN:
        message = f"{replica} exited with status {status}: it must not be run again"
        return ExitDecision(Action.FAIL, replica, status, reason="MustNotRunAgain", message=message)
    if status == 0:
        own = [number for number, one in enumerate(plan.tasks) if one.replica == replica]
        done = all(until_now.get(number) == 0 for number in own)
        if not (done and is_master):
            return None
        if policy == "Always" and not is_spent:
            message = f"{replica} has ended; restartPolicy Always restarts it"
            return ExitDecision(Action.RESTART, replica, 0, True, "Always", message)
        spent = f", and {_allows_no_more(plan.limits)}" if policy == "Always" else ""
        message = f"{replica} has ended with status 0{spent}"
        return ExitDecision(Action.SUCCEED, replica, 0, reason="MasterSucceeded", message=message)
    message, is_restarted = _failure(replica, status), restarts(policy, status)
    if not is_master and (is_spent or not is_restarted):
        return None
    if is_master and (earlier := [one for one in until_now if until_now[one] != 0])[0] != task:
        message += f", after {_failure(plan.tasks[earlier[0]].replica, until_now[earlier[0]])}"
    reason = "StoppedUnasked" if status == RUN_AGAIN else ""
    if is_restarted:
        reason = reason or "ReplicaFailed"
        return ExitDecision(Action.RESTART, replica, status, True, reason, message)
    message += f"; that is final with restartPolicy {policy}"
    return ExitDecision(
        Action.FAIL, replica, status, reason=reason or "MasterFailed", message=message
    )


def _failure(replica: str, status: int) -> str:
    if status == RUN_AGAIN:
        return (
            f"{replica} exited with status {status} (stopped and saved), but nobody has asked it "
            "to stop"
        )
    return f"{replica} failed with status {format_status(status)}"


def srun_was_killed(signal_number: int | None) -> ExitDecision:
    """srun ended without reporting on tasks that it had started: it took them with it, which is no
    failure of theirs. ``signal_number``: what killed it, if known."""
    how = "" if signal_number is None else f" ({format_status(128 + signal_number)})"
    message = f"srun was killed{how} and took its tasks with it; this is not counted as a failure"
    return ExitDecision(Action.RESTART, reason=SRUN_KILLED, message=message)


def step_cannot_start(why: str, waited_s: float) -> ExitDecision:
    """Slurm creates no job step on nodes that belong to this job alone."""
    message = (
        f"no job step could be started for {waited_s:.0f} s ({why}): Slurm still counts one that "
        "is over as running, as after its slurmstepd was killed"
    )
    return ExitDecision(Action.REQUEUE, reason="StepCannotStart", message=message)


def restarts(policy: str, status: int) -> bool:
    """Whether a policy restarts a replica that exited with this status."""
    if policy == "Always":
        return True
    if policy == "OnFailure":
        return status != 0
    return policy == "ExitCode" and status in RETRYABLE


def format_status(status: int) -> str:
    """``137 (SIGKILL)``"""
    try:
        return f"{status} ({signal.Signals(status - 128).name})" if status > 128 else str(status)
    except ValueError:
        return str(status)


def within_limits(
    decision: ExitDecision, limits: RunLimits, *, earlier_restarts: int, is_over_deadline: bool
) -> ExitDecision:
    """The same decision, or the failure of a job that its limits do not let start again."""
    if decision.action is Action.SUCCEED:
        return decision
    if is_over_deadline:
        message = f"activeDeadlineSeconds ({limits.active_deadline_seconds}) is exceeded"
        return replace(decision, action=Action.FAIL, reason=DEADLINE_EXCEEDED, message=message)
    if decision.counts and earlier_restarts >= limits.backoff_limit:
        message = f"{decision.message}; {_allows_no_more(limits)}"
        reason = "BackoffLimitExceeded"
        return replace(decision, action=Action.FAIL, reason=reason, message=message)
    return decision


def _allows_no_more(limits: RunLimits) -> str:
    limit = limits.backoff_limit
    return f"backoffLimit {limit} allows {'no more restarts' if limit else 'no restart'}"
