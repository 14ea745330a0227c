"""A node's state from the events of its agent, and what ``hydroslurm status`` says of it."""

from __future__ import annotations

from pathlib import Path

from hydroslurm.core import agentstate
from hydroslurm.core.agentstate import fold
from hydroslurm.core.events import Event, EventKind, EventLog
from hydroslurm.core.rundir import RunDir, comment_for
from hydroslurm.jobs.control.view import JobView
from hydroslurm.slurm.client import Job, JobState


def _event(kind: EventKind, at: int, *, node: int = 1, restart: int = 0, **data: object) -> Event:
    return Event(
        kind, at, at, rank=node, pid=50 + restart, host="n2", restart_count=restart, data=data
    )


STARTED = _event(EventKind.WORKERS_STARTED, 1, pids={"0": 11, "1": 12})
ASKED = _event(EventKind.SIGNAL_PASSED_ON, 2, signal="SIGUSR1", meaning="user_pause", workers=2)
PARKED = _event(
    EventKind.NODE_STATE, 3, state="parked", counts={"parked": 2}, held_for=["user"],
    asked="user_pause", answered=True, took_us=90.0,
)  # fmt: skip


def test_states_follow_the_events() -> None:
    """Started, asked, the state that its ranks share, left with a status."""
    told = [fold([STARTED, ASKED, PARKED][:n]) for n in range(1, 4)]
    assert [(one.state, one.asked, one.answered) for one in told if one] == [
        ("started", None, None),
        ("started", "user_pause", None),
        ("parked", "user_pause", True),
    ]
    left = fold([STARTED, ASKED, PARKED, _event(EventKind.AGENT_LEFT, 9, status=75)])
    assert left is not None
    assert (left.node, left.workers, left.state, left.status) == (1, 2, "left", 75)
    assert fold([]) is None


def test_new_workers_and_new_attempts_begin_anew() -> None:
    """After a restart of the workers, and of the job, nothing of before is told."""
    again = fold([STARTED, ASKED, PARKED, _event(EventKind.WORKERS_STARTED, 5, pids={"0": 13})])
    assert again is not None
    assert (again.state, again.workers, again.counts, again.asked) == ("started", 1, (), None)
    later = fold(
        [STARTED, PARKED, _event(EventKind.SIGNAL_PASSED_ON, 9, restart=1, meaning="stop")]
    )
    assert later is not None
    assert (later.state, later.workers, later.restart_count) == ("started", 0, 1)


def test_status_tells_of_the_nodes_of_this_attempt(tmp_path: Path) -> None:
    """One state per node that has an agent; those of an attempt with more nodes are left out."""
    run = RunDir(tmp_path / "run").create()
    for node, restart in ((0, 0), (1, 1), (2, 1), (3, 0)):
        log = EventLog(run.agent_events(node))
        log.append(_event(EventKind.WORKERS_STARTED, 5, node=node, restart=restart, pids={"0": 9}))
        log.close()
    job = Job(
        job_id=7, name="x", state=JobState.RUNNING, nodes=("n1", "n2", "n3"), restart_count=1,
        comment=comment_for(run),
    )  # fmt: skip
    assert [node.node for node in JobView(run, job).seen.nodes] == [1, 2]
    assert agentstate.latest(run.agent_events(9)) is None
