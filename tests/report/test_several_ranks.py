"""Runs of several ranks in the report: who was paused, when all were parked, and who asked for a
stop."""

from __future__ import annotations

import pytest
from report.ranklog import RankLog
from report.views import figures_of, history_of, shown

from hydroslurm.core.events import EventKind
from hydroslurm.report.history import History
from hydroslurm.report.pauses import Pause


def joined(rank: int, *, world_size: int = 2) -> RankLog:
    log = RankLog(rank=rank, pid=100 + rank).installed()
    return log.add(EventKind.RANKS_JOINED, 0.5, world_size=world_size, joined_s=0.5)


def all_parked(log: RankLog, at_s: float, *, in_flight: int = 0, let_through: int = 0) -> RankLog:
    return log.add(
        EventKind.ALL_PARKED, at_s, of_ranks=[0], in_flight=in_flight, rounds=2,
        let_through=let_through, agreed_us=7e3,
    )  # fmt: skip


def only(history: History) -> Pause:
    (pause,) = history.pauses
    return pause


def test_the_first_parking_is_the_latency() -> None:
    """A rank that is let through parks again behind each collective: its own latency is that of
    the first time, and that of all ranks is told beside it."""
    log = joined(1).pause(2, for_s=3, park_us=90)
    log.add(EventKind.LET_THROUGH, 2.001, pause=1, collectives=2)
    log.add(EventKind.PARKED, 2.004, pause=1, park_us=4e3, held=1, quiet=0, causes=["slurm"])
    pause = only(history_of(all_parked(log, 2.01, let_through=2)))
    assert (pause.park_us, pause.let_through, pause.in_flight) == (90, 2, 0)
    assert pause.all_parked_us == pytest.approx(10_000, rel=1e-3)
    assert pause.complete


def test_an_agreement_belongs_to_the_pause_of_its_time() -> None:
    """Two threads write the file: where the line is says nothing, its stamp does."""
    early = all_parked(joined(1), 6.02).pause(2, for_s=1).pause(6, for_s=1)
    late = all_parked(joined(1).pause(2, for_s=1).pause(6, for_s=1), 6.02)
    for log in (early, late):
        before, behind = history_of(log).pauses
        assert before.all_parked_mono_ns is None
        assert behind.all_parked_us == pytest.approx(20_000, rel=1e-3)


def test_a_rank_that_is_held_for_another() -> None:
    """``peers`` is the cause of a rank that has none of its own, and of no other."""
    signalled = joined(0).pause(2, cause="user")
    signalled.add(EventKind.CAUSES_CHANGED, 2.002, causes=["user", "peers"])
    late = joined(2).pause(2, cause="peers")
    history = history_of(signalled, joined(1).pause(2, cause="peers"), late)
    assert [pause.main_cause for pause in history.pauses] == ["user", "peers", "peers"]
    by_cause = figures_of(history).by_cause
    assert {cause: group.pauses for cause, group in by_cause.items()} == {"user": 1, "peers": 2}


def test_figures_of_several_ranks() -> None:
    """All parked has a summary of its own; pauses with collectives in flight are counted, those of
    ranks that gave up, too; a rank that is alone has neither."""
    logs = [all_parked(joined(rank).pause(2), 2.01, in_flight=rank) for rank in range(2)]
    figures = figures_of(history_of(*logs))
    assert (figures.all_parked_us["count"], figures.in_flight) == (2, 1)
    alone = figures_of(history_of(RankLog().installed().pause(2)))
    assert (alone.all_parked_us, alone.in_flight) == ({"count": 0}, 0)
    gave_up = joined(0).pause(2, for_s=5)
    gave_up.add(EventKind.AGREEMENT_FAILED, 3.5, what="park", in_flight=2, message="busy")
    pause = only(history_of(gave_up))
    assert (pause.all_parked_us, pause.in_flight) == (None, 2)


def test_the_table_of_several_ranks() -> None:
    """A row tells when all were parked and whether collectives were in flight; ranks that were let
    go before are counted; one that is alone has no such column."""
    good = all_parked(joined(0).pause(2, cause="user"), 2.01)
    bad = all_parked(joined(1).pause(2, cause="user"), 2.012, in_flight=1).pause(6, cause="peers")
    output = "\n".join(shown(history_of(good, bad)))
    rows = [line.split() for line in output.splitlines() if "aten::linear" in line]
    assert [row[:6] for row in rows] == [
        ["2.00", "0", "1", "user", "80", "10.0"],
        ["2.00", "1", "1", "user", "80", "12.0"],
        ["6.00", "1", "2", "peers", "80", "–"],
    ]
    assert rows[1][6] == "!"
    assert "1 pause with collectives in flight" in output
    assert "1 pause ended before all ranks were parked" in output
    alone = shown(history_of(RankLog().installed().pause(2)))
    headings = [" ".join(lines[:6]).split() for lines in (output.splitlines(), alone)]
    assert ["all" in words for words in headings] == [True, False]


def test_one_rank_asks_slurm_for_all() -> None:
    """A stop of several ranks is complete although only one of them knows why and was requeued; the
    others name the rank that was signalled."""
    first = joined(0).stop(10, step=40)
    second = joined(1).stop(10, step=40, without=("stop_reason", "requeue_asked", "requeued"))
    second.events = [event for event in second.events if event.kind is not EventKind.STOP_REQUESTED]
    second.add(EventKind.STOP_REQUESTED, 10, signal=None, requested_mono_ns=second.mono_ns(10))
    second.add(EventKind.STOP_AGREED, 10.005, of_rank=0, place=40)
    history = history_of(first, second)
    assert [stop.missing for stop in history.stops] == [(), ()]
    assert [stop.of_rank for stop in history.stops] == [None, 0]
    row = next(line.split() for line in shown(history) if " rank 0 " in line)
    assert row[:5] == ["10.0", "1", "1", "rank", "0"]
