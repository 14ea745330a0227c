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

WAIT, SUCCEED, RESTART, FAIL, LEAVE = (
    Action.WAIT, Action.SUCCEED, Action.RESTART, Action.FAIL, Action.LEAVE,
)  # fmt: skip
LIMIT, LATE = RunLimits(backoff_limit=2), RunLimits(active_deadline_seconds=60)
FAILURE = ExitDecision(RESTART, "worker-1", 3, True, "ReplicaFailed", "worker-1 failed")
SUCCESS = ExitDecision(SUCCEED, "worker-0", 0, reason="MasterSucceeded", message="it has ended")


def plan(policy: str = "OnFailure", *, tasks: int = 1) -> Plan:
    """Three workers, which may fail three times."""
    template = f"{{command: [python, train.py], resources: {{tasks: {tasks}}}}}"
    spec = f"replicaSpecs: [{{replicas: 3, restartPolicy: {policy}, template: {template}}}]"
    return plan_job(loads(spec).job, folder=Path("/w"), python="/usr/bin/python3")


def after(
    of: Plan, *ends: tuple[int, int], earlier: int = 0, unrequested: tuple[int, ...] = ()
) -> ExitDecision:
    return decide_exit(of, dict(ends), earlier_restarts=earlier, unrequested=unrequested)


@pytest.mark.parametrize(
    ("of", "ends", "action", "replica"),
    [
        (plan(), (), WAIT, ""),
        # rank 0 decides, whatever the others do
        (plan(), ((1, 0), (2, 0)), WAIT, ""),
        (plan(), ((1, 0), (0, 0)), SUCCEED, "worker-0"),
        (plan(), ((0, 0), (1, 1)), SUCCEED, "worker-0"),
        # a replica of two ranks has succeeded when both have
        (plan(tasks=2), ((0, 0),), WAIT, ""),
        (plan(tasks=2), ((0, 0), (1, 0)), SUCCEED, "worker-0"),
        # a worker that is never restarted leaves it to the master
        (plan("Never"), ((1, 1),), WAIT, ""),
        (plan("Never"), ((1, 1), (0, 0)), SUCCEED, "worker-0"),
        (plan("Never"), ((1, 1), (0, 1)), FAIL, "worker-0"),
        # the first failure counts: the others fail because of it
        (plan(), ((2, 1), (0, 134), (1, 1)), RESTART, "worker-2"),
        # a rank that saved and left may make others fail first
        (plan(), ((1, 1), (0, 75)), LEAVE, "worker-0"),
    ],
)
def test_what_follows_from_the_ends(
    of: Plan, ends: tuple[tuple[int, int], ...], action: Action, replica: str
) -> None:
    """In the order in which the tasks have ended."""
    found = after(of, *ends)
    assert (found.action, found.replica or "") == (action, replica)


@pytest.mark.parametrize("policy", ["Never", "OnFailure", "Always", "ExitCode"])
def test_every_policy(policy: str) -> None:
    """The whole table for the master. Once backoffLimit is spent every policy is Never: a worker
    that fails is not restarted, and the job goes on until its master ends. 75 that nobody asked for
    is an end like any other: a preemption would cost nothing and come again for ever."""
    of = plan(policy)
    for status in (0, 1, 75, 93, 126, 130, 137, 138, 139, 140, 143, 255):
        found = after(of, (0, status))
        if status in (75, 93):
            wanted = LEAVE if status == 75 else FAIL
        elif status == 0:
            wanted = RESTART if policy == "Always" else SUCCEED
        elif policy == "ExitCode":
            wanted = RESTART if status in (130, 137, 138, 140, 143) else FAIL
        else:
            wanted = FAIL if policy == "Never" else RESTART
        assert (found.action, found.counts) == (wanted, wanted is RESTART), status
        assert restarts(policy, status) or wanted is not RESTART

    assert after(of, (1, 137), earlier=2).action is not SUCCEED
    assert after(of, (1, 137), earlier=3).action is WAIT
    assert after(of, (1, 75), earlier=3, unrequested=(1,)).action is WAIT
    assert after(of, (1, 137), (2, 1), (0, 0), earlier=3).action is SUCCEED
    failed = after(of, (1, 137), (0, 143), earlier=3)
    found = within_limits(failed, of.limits, earlier_restarts=3, is_over_deadline=False)
    assert found.action is FAIL
    assert found.message.startswith(
        "worker-0 failed with status 143 (SIGTERM), after worker-1 failed with status 137 (SIGKILL)"
    )
    limit = "; backoffLimit 3 allows no more restarts"
    assert found.message.endswith(limit if policy != "Never" else "with restartPolicy Never")

    wanted = FAIL if policy in ("Never", "ExitCode") else RESTART
    found = after(of, (0, 75), unrequested=(0,))
    assert (found.action, found.replica, found.status) == (wanted, "worker-0", 75)
    assert (found.counts, found.reason) == (wanted is RESTART, "StoppedUnasked")
    assert "nobody has asked" in found.message
    worker = after(of, (1, 75), unrequested=(1,))
    assert worker.action is (WAIT if wanted is FAIL else wanted)
    assert after(of, (1, 75), (0, 75), unrequested=(1,)).action is LEAVE


@pytest.mark.parametrize(
    ("ended", "limits", "earlier", "action", "reason"),
    [
        (FAILURE, RunLimits(backoff_limit=0), 0, FAIL, "BackoffLimitExceeded"),
        (FAILURE, LIMIT, 1, RESTART, "ReplicaFailed"),
        (FAILURE, LIMIT, 2, FAIL, "BackoffLimitExceeded"),
        (FAILURE, LATE, 0, FAIL, DEADLINE_EXCEEDED),
        (SUCCESS, LATE, 0, SUCCEED, "MasterSucceeded"),
        # Always would start a script that does nothing for ever
        (after(plan("Always"), (0, 0), earlier=2), LIMIT, 2, FAIL, "BackoffLimitExceeded"),
        (after(plan("Always"), (0, 0), earlier=3), LIMIT, 3, SUCCEED, "MasterSucceeded"),
    ],
)
def test_limits(
    ended: ExitDecision, limits: RunLimits, earlier: int, action: Action, reason: str
) -> None:
    """So many restarts, and the failure behind them is the last. What is done is done; what fails
    when its time is over has not failed of itself."""
    found = within_limits(ended, limits, earlier_restarts=earlier, is_over_deadline=limits is LATE)
    assert (found.action, found.reason) == (action, reason)
    assert ("activeDeadlineSeconds (60)" in found.message) == (reason == DEADLINE_EXCEEDED)
