"""What follows from how tasks have ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydroslurm.jobs.launch.layout import plan_job
from hydroslurm.jobs.launch.plan import Plan
from hydroslurm.jobs.spec.reading import loads
from hydroslurm.jobs.supervisor.exit_policy import Judgement, Next, judge, restarts, unasked

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


def after(of: Plan, *ends: tuple[int, int]) -> Judgement:
    return judge(of, dict(ends), [task for task, _ in ends])


def test_nothing_has_ended() -> None:
    """As long as all run there is nothing to do."""
    assert after(plan()).next is Next.WAIT


def test_the_master_decides() -> None:
    """Rank 0 has succeeded, whatever the others do; a worker that ends well decides nothing."""
    assert after(plan(), (1, 0), (2, 0)).next is Next.WAIT
    assert after(plan(), (1, 0), (0, 0)).next is Next.SUCCEED


def test_a_master_of_its_own_is_the_first_rank() -> None:
    """The type master comes first, wherever it stands in the spec."""
    found = plan(master="Never")
    assert found.replicas[0] == "master-0"
    assert after(found, (0, 0)).replica == "master-0"


def test_all_tasks_of_the_master_must_have_ended() -> None:
    """A replica of two ranks has succeeded when both have."""
    assert after(plan(tasks=2), (0, 0)).next is Next.WAIT
    assert after(plan(tasks=2), (0, 0), (1, 0)).next is Next.SUCCEED


def test_the_first_failure_counts() -> None:
    """The others fail because of it."""
    found = after(plan(), (2, 1), (0, 134), (1, 1))
    assert (found.next, found.replica, found.status) == (Next.RESTART, "worker-2", 1)
    assert found.counts


def test_a_failure_behind_the_success_of_the_master_changes_nothing() -> None:
    """The job is decided by then."""
    assert after(plan(), (0, 0), (1, 1)).next is Next.SUCCEED


@pytest.mark.parametrize("policy", ["Never", "OnFailure", "Always", "ExitCode"])
@pytest.mark.parametrize("status", [0, 1, 2, 75, 93, 126, 130, 137, 138, 139, 140, 143, 255])
def test_every_policy_and_status_of_the_master(policy: str, status: int) -> None:
    """The whole table."""
    found = after(plan(policy), (0, status))
    if status == 75:
        wanted = Next.LEAVE
    elif status == 93:
        wanted = Next.FAIL
    elif status == 0:
        wanted = Next.RESTART if policy == "Always" else Next.SUCCEED
    elif policy == "ExitCode":
        wanted = Next.RESTART if status in (130, 137, 138, 140, 143) else Next.FAIL
    elif policy != "Never":
        wanted = Next.RESTART
    else:
        wanted = Next.FAIL
    assert found.next is wanted
    assert found.counts == (wanted is Next.RESTART)
    assert restarts(policy, status) or wanted is not Next.RESTART


def test_a_worker_that_is_never_restarted_leaves_it_to_the_master() -> None:
    """Its failure is final, the job's end is the master's."""
    assert after(plan("Never"), (1, 1)).next is Next.WAIT
    assert after(plan("Never"), (1, 1), (0, 0)).next is Next.SUCCEED
    assert after(plan("Never"), (1, 1), (0, 1)).next is Next.FAIL


def test_saved_and_left_wins_over_what_it_did_to_others() -> None:
    """A rank that left with 75 may make others fail first."""
    assert after(plan(), (1, 1), (0, 75)).next is Next.LEAVE


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ("Never", Next.FAIL), ("ExitCode", Next.FAIL),
        ("OnFailure", Next.RESTART), ("Always", Next.RESTART),
    ],
)  # fmt: skip
def test_75_that_nobody_asked_for_is_an_end_like_any_other(policy: str, wanted: Next) -> None:
    """No preemption, which would cost nothing and come again for ever."""
    of = plan(policy)
    found = unasked(of, after(of, (1, 75)))
    assert (found.next, found.replica, found.status) == (wanted, "worker-1", 75)
    assert found.counts == (wanted is Next.RESTART)
    assert "nobody has asked" in found.words
