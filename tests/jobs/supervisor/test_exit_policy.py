"""What follows from how tasks have ended, and when a job is given up."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydroslurm.jobs.layout import plan_job
from hydroslurm.jobs.plan import Plan, RunLimits
from hydroslurm.jobs.spec.reading import loads
from hydroslurm.jobs.supervisor.exit_policy import (
    DEADLINE_EXCEEDED,
    Action,
    ExitDecision,
    decide_exit,
    restarts,
    within_limits,
)

POLICIES = ("Never", "OnFailure", "Always", "ExitCode")
WAIT, SUCCEED, RESTART, FAIL, LEAVE = (
    Action.WAIT, Action.SUCCEED, Action.RESTART, Action.FAIL, Action.LEAVE,
)  # fmt: skip


def plan(policy: str = "OnFailure", *, tasks: int = 1) -> Plan:
    """Three workers."""
    template = f"{{command: [python, train.py], resources: {{tasks: {tasks}}}}}"
    spec = f"replicaSpecs: [{{replicas: 3, restartPolicy: {policy}, template: {template}}}]"
    return plan_job(loads(spec).job, folder=Path("/w"), python="/usr/bin/python3")


def after(
    of: Plan, *ends: tuple[int, int], earlier: int = 0, unrequested: tuple[int, ...] = ()
) -> ExitDecision:
    return decide_exit(of, dict(ends), earlier_restarts=earlier, unrequested=unrequested)


@pytest.mark.parametrize(
    ("of", "ends", "action"),
    [
        (plan(), (), WAIT),
        # rank 0 decides, whatever the others do
        (plan(), ((1, 0), (2, 0)), WAIT),
        (plan(), ((1, 0), (0, 0)), SUCCEED),
        (plan(), ((0, 0), (1, 1)), SUCCEED),
        # a replica of two ranks has succeeded when both have
        (plan(tasks=2), ((0, 0),), WAIT),
        (plan(tasks=2), ((0, 0), (1, 0)), SUCCEED),
        # a worker that is never restarted leaves it to the master
        (plan("Never"), ((1, 1),), WAIT),
        (plan("Never"), ((1, 1), (0, 0)), SUCCEED),
        (plan("Never"), ((1, 1), (0, 1)), FAIL),
        # a rank that saved and left may make others fail first
        (plan(), ((1, 1), (0, 75)), LEAVE),
    ],
)
def test_what_follows_from_the_ends(
    of: Plan, ends: tuple[tuple[int, int], ...], action: Action
) -> None:
    """In the order in which the tasks have ended."""
    assert after(of, *ends).action is action


def test_the_first_failure_counts() -> None:
    """The others fail because of it."""
    found = after(plan(), (2, 1), (0, 134), (1, 1))
    assert (found.action, found.replica, found.status) == (RESTART, "worker-2", 1)
    assert found.counts


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("status", [0, 1, 75, 93, 126, 130, 137, 138, 139, 140, 143, 255])
def test_every_policy_and_status_of_the_master(policy: str, status: int) -> None:
    """The whole table."""
    found = after(plan(policy), (0, status))
    if status in (75, 93):
        wanted = LEAVE if status == 75 else FAIL
    elif status == 0:
        wanted = RESTART if policy == "Always" else SUCCEED
    elif policy == "ExitCode":
        wanted = RESTART if status in (130, 137, 138, 140, 143) else FAIL
    else:
        wanted = FAIL if policy == "Never" else RESTART
    assert found.action is wanted
    assert found.counts == (wanted is RESTART)
    assert restarts(policy, status) or wanted is not RESTART


@pytest.mark.parametrize("policy", POLICIES)
def test_once_backoff_limit_is_spent_every_policy_is_never(policy: str) -> None:
    """A worker that fails is not restarted, and the job goes on: it fails when its master fails,
    and has succeeded when its master has."""
    of, spent = plan(policy), 3
    assert of.limits.backoff_limit == spent
    assert after(of, (1, 137), earlier=spent - 1).action is not SUCCEED
    assert after(of, (1, 137), earlier=spent).action is WAIT
    assert after(of, (1, 75), earlier=spent, unrequested=(1,)).action is WAIT
    assert after(of, (1, 137), (2, 1), (0, 0), earlier=spent).action is SUCCEED
    failed = after(of, (1, 137), (0, 143), earlier=spent)
    found = within_limits(failed, of.limits, earlier_restarts=spent, is_over_deadline=False)
    assert found.action is FAIL
    assert found.message.startswith(
        "worker-0 failed with status 143 (SIGTERM), after worker-1 failed with status 137 (SIGKILL)"
    )
    limit = "; backoffLimit 3 allows no more restarts"
    assert found.message.endswith(limit if policy != "Never" else "with restartPolicy Never")


@pytest.mark.parametrize("policy", POLICIES)
def test_75_that_nobody_asked_for_is_an_end_like_any_other(policy: str) -> None:
    """No preemption, which would cost nothing and come again for ever; of a worker as of the
    master."""
    wanted = FAIL if policy in ("Never", "ExitCode") else RESTART
    found = after(plan(policy), (0, 75), unrequested=(0,))
    assert (found.action, found.replica, found.status) == (wanted, "worker-0", 75)
    assert (found.counts, found.reason) == (wanted is RESTART, "StoppedUnasked")
    assert "nobody has asked" in found.message
    worker = WAIT if wanted is FAIL else wanted
    assert after(plan(policy), (1, 75), unrequested=(1,)).action is worker
    assert after(plan(policy), (1, 75), (0, 75), unrequested=(1,)).action is LEAVE


FAILURE = ExitDecision(RESTART, "worker-1", 3, True, "ReplicaFailed", "worker-1 failed")
SUCCESS = ExitDecision(SUCCEED, "worker-0", 0, reason="MasterSucceeded", message="it has ended")


@pytest.mark.parametrize(
    ("ended", "limits", "earlier", "is_late", "action", "reason"),
    [
        (FAILURE, RunLimits(backoff_limit=0), 0, False, FAIL, "BackoffLimitExceeded"),
        (FAILURE, RunLimits(backoff_limit=2), 1, False, RESTART, "ReplicaFailed"),
        (FAILURE, RunLimits(backoff_limit=2), 2, False, FAIL, "BackoffLimitExceeded"),
        (FAILURE, RunLimits(active_deadline_seconds=60), 0, True, FAIL, DEADLINE_EXCEEDED),
        (SUCCESS, RunLimits(active_deadline_seconds=60), 0, True, SUCCEED, "MasterSucceeded"),
    ],
)
def test_limits(
    ended: ExitDecision,
    limits: RunLimits,
    earlier: int,
    is_late: bool,
    action: Action,
    reason: str,
) -> None:
    """So many restarts, and the failure behind them is the last. What is done is done; what fails
    when its time is over has not failed of itself."""
    found = within_limits(ended, limits, earlier_restarts=earlier, is_over_deadline=is_late)
    assert (found.action, found.reason) == (action, reason)
    assert ("activeDeadlineSeconds (60)" in found.message) == (reason == DEADLINE_EXCEEDED)


def test_a_restart_after_a_success_counts_too() -> None:
    """restartPolicy Always would start a script that does nothing for ever; what is not started
    again has succeeded."""
    found = after(plan("Always"), (0, 0), earlier=2)
    assert (found.action, found.counts) == (RESTART, True)
    found = after(plan("Always"), (0, 0), earlier=3)
    said = "worker-0 has ended with status 0, and backoffLimit 3 allows no more restarts"
    assert (found.action, found.message) == (SUCCEED, said)
