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

PYTHON = "/usr/bin/python3"


def plan(policy: str = "OnFailure", *, replicas: int = 3, tasks: int = 1, master: str = "") -> Plan:
    worker = f"""
- type: worker
  replicas: {replicas}
  restartPolicy: {policy}
  template: {{command: [python, train.py], resources: {{tasks: {tasks}}}}}
"""
    first = f"""
- type: master
  restartPolicy: {master}
  template: {{command: [python, train.py]}}
"""
    text = f"replicaSpecs:{worker}{first.lstrip() if master else ''}"
    return plan_job(loads(text.replace("\n\n", "\n")).job, folder=Path("/w"), python=PYTHON)


def after(
    of: Plan, *ends: tuple[int, int], earlier: int = 0, unrequested: tuple[int, ...] = ()
) -> ExitDecision:
    return decide_exit(of, dict(ends), earlier_restarts=earlier, unrequested=unrequested)


@pytest.mark.parametrize(
    ("of", "ends", "action"),
    [
        (plan(), (), Action.WAIT),
        # rank 0 decides, whatever the others do
        (plan(), ((1, 0), (2, 0)), Action.WAIT),
        (plan(), ((1, 0), (0, 0)), Action.SUCCEED),
        (plan(), ((0, 0), (1, 1)), Action.SUCCEED),
        # a replica of two ranks has succeeded when both have
        (plan(tasks=2), ((0, 0),), Action.WAIT),
        (plan(tasks=2), ((0, 0), (1, 0)), Action.SUCCEED),
        # a worker that is never restarted leaves it to the master
        (plan("Never"), ((1, 1),), Action.WAIT),
        (plan("Never"), ((1, 1), (0, 0)), Action.SUCCEED),
        (plan("Never"), ((1, 1), (0, 1)), Action.FAIL),
        # a rank that saved and left may make others fail first
        (plan(), ((1, 1), (0, 75)), Action.LEAVE),
    ],
)
def test_what_follows_from_the_ends(
    of: Plan, ends: tuple[tuple[int, int], ...], action: Action
) -> None:
    """In the order in which the tasks have ended."""
    assert after(of, *ends).action is action


def test_a_master_of_its_own_is_the_first_rank() -> None:
    """The type master comes first, wherever it stands in the spec."""
    found = plan(master="Never")
    assert found.replicas[0] == "master-0"
    assert after(found, (0, 0)).replica == "master-0"


def test_the_first_failure_counts() -> None:
    """The others fail because of it."""
    found = after(plan(), (2, 1), (0, 134), (1, 1))
    assert (found.action, found.replica, found.status) == (Action.RESTART, "worker-2", 1)
    assert found.counts


@pytest.mark.parametrize("policy", ["Never", "OnFailure", "Always", "ExitCode"])
@pytest.mark.parametrize("status", [0, 1, 2, 75, 93, 126, 130, 137, 138, 139, 140, 143, 255])
def test_every_policy_and_status_of_the_master(policy: str, status: int) -> None:
    """The whole table."""
    found = after(plan(policy), (0, status))
    if status == 75:
        wanted = Action.LEAVE
    elif status == 93:
        wanted = Action.FAIL
    elif status == 0:
        wanted = Action.RESTART if policy == "Always" else Action.SUCCEED
    elif policy == "ExitCode":
        wanted = Action.RESTART if status in (130, 137, 138, 140, 143) else Action.FAIL
    elif policy != "Never":
        wanted = Action.RESTART
    else:
        wanted = Action.FAIL
    assert found.action is wanted
    assert found.counts == (wanted is Action.RESTART)
    assert restarts(policy, status) or wanted is not Action.RESTART


@pytest.mark.parametrize("policy", ["Never", "OnFailure", "Always", "ExitCode"])
def test_once_backoff_limit_is_spent_every_policy_is_never(policy: str) -> None:
    """A worker that fails is not restarted, and the job goes on: it fails when its master fails,
    and has succeeded when its master has."""
    of, spent = plan(policy), 3
    assert of.limits.backoff_limit == spent
    assert after(of, (1, 137), earlier=spent - 1).action is not Action.SUCCEED
    assert after(of, (1, 137), earlier=spent).action is Action.WAIT
    assert after(of, (1, 75), earlier=spent, unrequested=(1,)).action is Action.WAIT
    assert after(of, (1, 137), (2, 1), (0, 0), earlier=spent).action is Action.SUCCEED
    failed = after(of, (1, 137), (0, 143), earlier=spent)
    found = within_limits(failed, of.limits, earlier_restarts=spent, is_over_deadline=False)
    assert found.action is Action.FAIL
    assert found.message.startswith(
        "worker-0 failed with status 143 (SIGTERM), after worker-1 failed with status 137 (SIGKILL)"
    )
    limit = "; backoffLimit 3 allows no more restarts"
    assert found.message.endswith(limit if policy != "Never" else "with restartPolicy Never")


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ("Never", Action.FAIL), ("ExitCode", Action.FAIL),
        ("OnFailure", Action.RESTART), ("Always", Action.RESTART),
    ],
)  # fmt: skip
def test_75_that_nobody_asked_for_is_an_end_like_any_other(policy: str, wanted: Action) -> None:
    """No preemption, which would cost nothing and come again for ever; of a worker as of the
    master."""
    found = after(plan(policy), (0, 75), unrequested=(0,))
    assert (found.action, found.replica, found.status) == (wanted, "worker-0", 75)
    assert (found.counts, found.reason) == (wanted is Action.RESTART, "StoppedUnasked")
    assert "nobody has asked" in found.message
    worker = Action.WAIT if wanted is Action.FAIL else wanted
    assert after(plan(policy), (1, 75), unrequested=(1,)).action is worker
    assert after(plan(policy), (1, 75), (0, 75), unrequested=(1,)).action is Action.LEAVE


FAILURE = ExitDecision(Action.RESTART, "worker-1", 3, True, "ReplicaFailed", "worker-1 failed")
SUCCESS = ExitDecision(
    Action.SUCCEED, "worker-0", 0, reason="MasterSucceeded", message="it has ended"
)


@pytest.mark.parametrize(
    ("earlier", "limit", "is_over"), [(0, 0, True), (1, 2, False), (2, 2, True)]
)
def test_failures_are_counted_against_one_limit(earlier: int, limit: int, is_over: bool) -> None:
    """So many restarts, and the failure behind them is the last."""
    policy = RunLimits(backoff_limit=limit)
    found = within_limits(FAILURE, policy, earlier_restarts=earlier, is_over_deadline=False)
    wanted = (Action.FAIL, "BackoffLimitExceeded") if is_over else (Action.RESTART, FAILURE.reason)
    assert (found.action, found.reason) == wanted


def test_a_restart_after_a_success_counts_too() -> None:
    """restartPolicy Always would start a script that does nothing for ever; what is not started
    again has succeeded."""
    found = after(plan("Always"), (0, 0), earlier=2)
    assert (found.action, found.counts) == (Action.RESTART, True)
    found = after(plan("Always"), (0, 0), earlier=3)
    assert (found.action, found.message) == (
        Action.SUCCEED,
        "worker-0 has ended with status 0, and backoffLimit 3 allows no more restarts",
    )


def test_success_comes_before_the_deadline_and_the_deadline_before_a_failure() -> None:
    """What is done is done; what fails when its time is over has not failed of itself."""
    policy = RunLimits(active_deadline_seconds=60)
    done = within_limits(SUCCESS, policy, earlier_restarts=0, is_over_deadline=True)
    assert done is SUCCESS
    late = within_limits(FAILURE, policy, earlier_restarts=0, is_over_deadline=True)
    assert (late.action, late.reason) == (Action.FAIL, DEADLINE_EXCEEDED)
    assert "activeDeadlineSeconds (60)" in late.message
