"""A rank's state from its events."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from hydroslurm.cli.status import _since, rank_line
from hydroslurm.core.dates import by_date_of_now, clocks
from hydroslurm.core.events import Event, EventKind, EventLog
from hydroslurm.core.heartbeat import Heartbeat
from hydroslurm.core.rankstate import fold, latest


def _event(kind: EventKind, at: int, **data: object) -> Event:
    return Event(kind, at, at, rank=3, pid=99, host="n1", step=at, data=data)


PAUSED = [
    _event(EventKind.INSTALLED, 1),
    _event(EventKind.SIGNAL_RECEIVED, 2, signal="SIGUSR1"),
    _event(EventKind.GATE_CLOSED, 3, pause=1, causes=["user"]),
    _event(EventKind.PARKED, 4, pause=1, park_us=51.5, causes=["user"], held=1),
]


def test_states_follow_the_events() -> None:
    """running -> parking -> parked -> running, each since its own event."""
    seen = [(s.state, s.since_epoch_ns) for n in range(1, 5) if (s := fold(PAUSED[:n]))]
    assert seen == [("running", 1), ("running", 1), ("parking", 3), ("parked", 4)]
    parked = fold(PAUSED)
    assert parked is not None
    assert (parked.causes, parked.park_us, parked.pauses, parked.step) == (("user",), 51.5, 1, 4)
    resumed = fold([*PAUSED, _event(EventKind.RESUMED, 9, pause=1, causes=[])])
    assert resumed is not None
    assert (resumed.state, resumed.causes) == ("running", ())


def test_a_stop_is_not_undone_by_the_opening_of_the_gate() -> None:
    """A rank that was told to stop stays stopping while it runs to its safe point."""
    state = fold(
        [*PAUSED, _event(EventKind.STOP_REQUESTED, 5), _event(EventKind.RESUMED, 6, causes=[])]
    )
    assert state is not None
    assert state.state == "stopping"


def test_a_requeued_rank_begins_anew() -> None:
    """The next attempt's first event forgets the pause of the one before."""
    state = fold([*PAUSED, _event(EventKind.INSTALLED, 20)])
    assert state is not None
    assert (state.state, state.causes, state.pauses) == ("running", (), 0)


def test_a_rank_that_is_let_through_stays_parked() -> None:
    """It parks again behind each collective; its state, since when, and its latency are those of
    the first time."""
    passage = [
        _event(EventKind.LET_THROUGH, 5, pause=1, collectives=1),
        _event(EventKind.PARKED, 6, pause=1, park_us=900.0, causes=["user", "peers"], held=1),
    ]
    state = fold([*PAUSED, *passage])
    assert state is not None
    assert (state.state, state.since_epoch_ns, state.park_us) == ("parked", 4, 51.5)


def test_parked_together() -> None:
    """From the word that all ranks are parked until this one goes on or the coordinator is gone."""
    joined = _event(EventKind.RANKS_JOINED, 1, world_size=4, joined_s=0.1)
    all_parked = _event(EventKind.ALL_PARKED, 8, of_ranks=[3], in_flight=0)
    told = fold([PAUSED[0], joined, *PAUSED[1:], all_parked])
    assert told is not None
    assert (told.world_size, told.parked_together) == (4, True)
    before = fold([PAUSED[0], joined, *PAUSED[1:]])
    resumed = fold([*PAUSED, all_parked, _event(EventKind.RESUMED, 9, causes=[])])
    again = fold([*PAUSED, all_parked, *(_at(event, 20) for event in PAUSED[2:])])
    assert [state and state.parked_together for state in (before, resumed, again)] == [False] * 3
    lost = fold([joined, _event(EventKind.AGREEMENT_FAILED, 9, what="connection", message="gone")])
    assert lost is not None
    assert lost.world_size == 1


def test_two_threads_write_one_file() -> None:
    """The line of a closing may follow that of the agreement which came of it."""
    all_parked = _event(EventKind.ALL_PARKED, 8, of_ranks=[3], in_flight=0)
    state = fold([PAUSED[0], all_parked, *PAUSED[2:]])
    assert state is not None
    assert state.parked_together


def _at(event: Event, at: int) -> Event:
    return replace(event, mono_ns=at + event.mono_ns, epoch_ns=at + event.epoch_ns)


def test_the_end_of_a_long_file_is_enough(tmp_path: Path) -> None:
    """A file far longer than what is read gives the same state."""
    log = EventLog(tmp_path / "rank-00003.jsonl")
    for at in range(2000):
        log.append(_event(EventKind.CAUSES_CHANGED, at, causes=[]))
    for event in PAUSED[2:]:
        log.append(event)
    log.close()
    assert log.path is not None
    assert log.path.stat().st_size > 2 * 64 * 1024
    state = latest(log.path)
    assert state is not None
    assert state.state == "parked"


def test_no_file_is_no_state(tmp_path: Path) -> None:
    """A rank that has written nothing has no state."""
    assert latest(tmp_path / "none.jsonl") is None


@pytest.mark.parametrize("direction", [1, -1])
def test_a_date_that_was_set_makes_nothing_older(tmp_path: Path, direction: int) -> None:
    """A rank of this host parked 5 s ago; by a date that was set since, an hour ago or in an hour.
    Its state, the commands' messages and the heartbeat that `top` reads say 5 s."""
    host = socket.gethostname()
    mono_ns, epoch_ns = (one - 5 * 10**9 for one in clocks())
    # a date before this boot would be an earlier boot's: not an hour on a machine just booted
    told_ns = epoch_ns + direction * min(3600 * 10**9, mono_ns // 2)
    log = EventLog(tmp_path / "rank-00003.jsonl")
    for kind in (EventKind.INSTALLED, EventKind.PARKED):
        log.append(Event(kind, mono_ns, told_ns, rank=3, host=host))
    log.close()
    assert log.path is not None
    state = latest(log.path)
    assert state is not None
    assert abs(state.since_epoch_ns - epoch_ns) < 10**9
    heartbeat = Heartbeat(7, told_ns, told_ns - 3 * 10**9, 1.0, 10.0, 0, 1, mono_ns).dated_now(host)
    assert abs(heartbeat.epoch_ns - epoch_ns) < 10**9
    assert heartbeat.epoch_ns - heartbeat.since_epoch_ns == 3 * 10**9


def test_whose_date_is_left_alone() -> None:
    """An event of another host, or of an earlier boot, was when its own date said."""
    s, now = 10**9, (1000 * 10**9, 50_000 * 10**9)
    here = socket.gethostname()
    assert by_date_of_now(990 * s, 53_590 * s, here, now=now) == 49_990 * s
    assert by_date_of_now(990 * s, 49_990 * s + 9, here, now=now) == 49_990 * s + 9
    assert by_date_of_now(990 * s, 53_590 * s, "another", now=now) == 53_590 * s
    assert by_date_of_now(900 * s, 40_000 * s, here, now=now) == 40_000 * s
    assert by_date_of_now(7000 * s, 48_000 * s, here, now=now) == 48_000 * s
    assert _since(53_570 * s, now[1]) == "since 3,570 s in the future by this host's clock"
    assert _since(now[1] - 3 * s, now[1]) == "since 3.0 s"


def test_children_that_run_on_are_named() -> None:
    """Parked is said of the main process only while a child of it runs on, with the child's number
    and what to do; it is forgotten when the rank goes on."""
    quiet = _event(EventKind.CHILDREN, 5, pause=1, parked_pids=[7, 8], running_pids=[])
    busy = _event(EventKind.CHILDREN, 6, pause=1, parked_pids=[7], running_pids=[8, 9])
    state = fold([*PAUSED, quiet])
    assert state is not None
    assert (state.message, state.children_message) == ("parked", "2 children stand still with it")
    state = fold([*PAUSED, quiet, busy])
    assert state is not None
    assert state.message == "main process parked"
    assert state.children_message.startswith(
        "2 children of it run on (pids 8, 9): pause them with "
    )
    state = fold([*PAUSED, busy, _event(EventKind.RESUMED, 9, pause=1, causes=[])])
    assert state is not None
    assert (state.message, state.children_message) == ("running", "")


def test_saves_that_hold_the_training_up_are_said() -> None:
    """`status` says so from the first save on that was not copied, until one is."""
    installed = _event(EventKind.INSTALLED, 1)
    not_copied = _event(EventKind.SAVE_NOT_COPIED, 2, reason="there is no memory")
    held = fold([installed, not_copied])
    assert held is not None
    assert "saves hold the training up: there is no memory" in rank_line(held, now_epoch_ns=5)
    copied = fold([installed, not_copied, _event(EventKind.SAVE_STAGED, 3, reason="")])
    assert copied is not None
    assert "hold" not in rank_line(copied, now_epoch_ns=5)
