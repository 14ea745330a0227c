"""When a job is given up, and when it is started again."""

from __future__ import annotations

import pytest

from hydroslurm.jobs.spec.sections import RunPolicy
from hydroslurm.jobs.supervisor.exit_policy import (
    DEADLINE_EXCEEDED,
    Action,
    ExitDecision,
    decide_job,
)

FAILURE = ExitDecision(Action.RESTART, "worker-1", 3, True, "ReplicaFailed", "worker-1 failed")
SUCCESS = ExitDecision(
    Action.SUCCEED, "worker-0", 0, reason="MasterSucceeded", message="it has ended"
)


@pytest.mark.parametrize(
    ("earlier", "limit", "is_over"), [(0, 0, True), (1, 2, False), (2, 2, True)]
)
def test_failures_are_counted_against_one_limit(earlier: int, limit: int, is_over: bool) -> None:
    """So many restarts, and the failure behind them is the last."""
    policy = RunPolicy(backoff_limit=limit)
    found = decide_job(FAILURE, policy, earlier_restarts=earlier, is_over_deadline=False)
    assert (found is not None) == is_over
    assert found is None or (found.failed, found.reason) == (True, "BackoffLimitExceeded")


def test_a_restart_after_a_success_counts_too() -> None:
    """restartPolicy Always would start a script that does nothing for ever."""
    again = ExitDecision(Action.RESTART, "worker-0", 0, True, "Always", "worker-0 has ended")
    policy = RunPolicy(backoff_limit=1)
    assert decide_job(again, policy, earlier_restarts=0, is_over_deadline=False) is None
    found = decide_job(again, policy, earlier_restarts=1, is_over_deadline=False)
    assert found is not None
    assert (found.reason, found.message) == (
        "BackoffLimitExceeded", "worker-0 has ended: restart 2, with backoffLimit 1"
    )  # fmt: skip


def test_success_comes_before_the_deadline_and_the_deadline_before_a_failure() -> None:
    """What is done is done; what fails when its time is over has not failed of itself."""
    policy = RunPolicy(active_deadline_seconds=60)
    done = decide_job(SUCCESS, policy, earlier_restarts=0, is_over_deadline=True)
    assert done is not None
    assert not done.failed
    late = decide_job(FAILURE, policy, earlier_restarts=0, is_over_deadline=True)
    assert late is not None
    assert (late.failed, late.reason) == (True, DEADLINE_EXCEEDED)
    assert "activeDeadlineSeconds (60)" in late.message
