"""Events -> stops: whole, torn, killed, with the date set in between; and of several ranks."""

from __future__ import annotations

from typing import Any

import pytest
from report.ranklog import RankLog
from report.views import figures_of, history_of, shown, tells

from hydroslurm.core.events import EventKind
from hydroslurm.report.history import History
from hydroslurm.report.pauses import Pause

NOT_REQUEUED = ("requeue_asked", "requeued")
AT_10_S = {"requested_mono_ns": RankLog().mono_ns(10)}


def began(**options: Any) -> RankLog:
    return RankLog(pid=1, **options).trains(0, attempt=1)


def first(**stop: Any) -> RankLog:
    """Stopped after 10 s with step 40."""
    return began().stop(10, **{"step": 40, **stop})


def second(step: int = 40, **options: Any) -> RankLog:
    return RankLog(pid=2, restart_count=1, **options).trains(20, attempt=2, step=step)


def saved(log: RankLog, step: int, at_s: float) -> RankLog:
    return log.add(EventKind.SAVE_COMMITTED, at_s, checkpoint_step=step, save_kind="periodic")


def ended(log: RankLog, at_s: float, ending: str) -> RankLog:
    log.add(EventKind.ATTEMPT_ENDED, at_s, attempt=1, ending=ending)
    return log.uninstalled(at_s + 0.1)


def killed(until: str, *missing: str, steps_lost: int = 10) -> tuple[list[RankLog], dict[str, Any]]:
    """What an attempt that was killed while it saved lacks and lost."""
    is_bound = until == "stop_requested"
    told = {"missing": missing, "left": "killed", "steps_lost": steps_lost - is_bound}
    return [first(until=until), second(30)], {**told, "steps_lost_exactly": not is_bound}


def torn(line: str, **parts: Any) -> tuple[list[RankLog], dict[str, Any]]:
    """A line that is lost is named, and nothing is put in its place."""
    told = {"missing": (line,), "steps_lost": 0, "step": 40, "reason": "preempted", **parts}
    return [first(without=(line,)), second()], told


STOPS: dict[str, tuple[list[RankLog], dict[str, Any]]] = {
    "whole; of a reason that is told twice the first counts": (
        [first().add(EventKind.STOP_REASON, 10.09, reason="asked", message="again"), second()],
        {"complete": True, "missing": (), "left": "preempted", "signal": "SIGTERM"}
        | {"reason": "preempted", "message": "in words", "attempt": 1, "step": 40}
        | {"step_from": "safe_point", "next_step": 40, "safe_point_ms": 20, "staged_ms": 30}
        | {"written_ms": 45, "durable_ms": 50, "requeued_ms": 60, "waited_s": 9.9}
        | {"first_step_s": 2.5, "steps_lost": 0, "steps_lost_exactly": True, "state_bytes": 1000},
    ),
    "killed when asked": killed(
        "stop_requested", "stop_reason", "safe_point", "save_committed", "attempt_ended"
    ),
    "killed after the commit": killed("save_committed", "attempt_ended"),
    "the next one began further on": (
        [began().add(EventKind.SAVE_SKIPPED, 9), second(30)],
        {"left": "killed", "steps_lost": 0},
    ),
    "killed before the requeue": (
        [first(until="attempt_ended"), second(30)],
        {"missing": ("requeued",), "left": "preempted", "steps_lost": 10},
    ),
    "no request": torn("stop_requested", requeued_ms=None, safe_point_ms=None, durable_ms=None),
    "no safe point": torn("safe_point", safe_point_ms=None, durable_ms=50),
    "no answer to the requeue": torn("requeued", requeued_ms=None, safe_point_ms=20),
    "an exception, run again: it had no request": (
        [ended(began().at_step(60), 9, "error"), second(50)],
        {"left": "error", "missing": (), "steps_lost": 10},
    ),
    "cancelled: nothing follows, and nothing of it is missed": (
        [first(reason="cancelled", without=NOT_REQUEUED)],
        {"complete": True, "left": "cancelled", "requeued_ms": None, "waited_s": None}
        | {"steps_lost": None, "steps_lost_exactly": True},
    ),
    "finished inside the grace, and started once more": (
        [
            ended(began().add(EventKind.STOP_REQUESTED, 10, **AT_10_S), 11, "finished"),
            RankLog(pid=2, restart_count=1).installed(20).uninstalled(21),
        ],
        {"left": "finished", "missing": (), "steps_lost": 0},
    ),
    "outside of a job": (
        [
            began(job_id=None).stop(
                10, step=40, reason="asked", without=("stop_reason", *NOT_REQUEUED)
            ),
            RankLog(pid=2, job_id=None).trains(13, attempt=2, step=40),
        ],
        {"complete": True, "reason": None, "left": "asked", "steps_lost": 0},
    ),
    "Slurm's refusal instead of a requeue": (
        [first(until="requeue_asked").add(EventKind.REQUEUE_FAILED, 10.06, reason="denied")],
        {"missing": (), "requeued_ms": None, "requeue_error": "denied"},
    ),
    "a step that was committed before the request": (
        [
            saved(began().at_step(40), 40, 9).stop(
                10, step=40, without=("save_started", "save_staged", "save_committed")
            ),
            second(),
        ],
        {"durable_ms": 0.0, "staged_ms": None, "missing": ()},
    ),
    "the commit of another step is not the stop's": (
        [saved(began(), 30, 10.03).stop(10, step=40, without=("save_committed",)), second(30)],
        {"durable_ms": None, "missing": ("save_committed",), "steps_lost": 10},
    ),
    "the date set forth in between": (
        [first(), second(date_off_s=3600.0)],
        {"durable_ms": 50, "first_step_s": 2.5, "waited_s": 3609.9, "steps_lost": 0},
    ),
    "where only pausing was installed": (
        [
            RankLog(pid=1).installed().pause(2).add(EventKind.STOP_REQUESTED, 6, **AT_10_S),
            RankLog(pid=2, restart_count=1).installed(20),
        ],
        {"left": "killed", "missing": (), "steps_lost": None, "steps_lost_exactly": False}
        | {"waited_s": 14},
    ),
}


@pytest.mark.parametrize("name", STOPS)
def test_one_stop(name: str) -> None:
    """What is told of it: every part from the first request, what is missing, what was lost."""
    logs, told = STOPS[name]
    (stop,) = history_of(*logs).stops
    tells(stop, told)


def test_no_stop() -> None:
    """An attempt without an end that nobody followed may still run; one that ended by an exception
    counts only when another went on."""
    assert history_of(began()).stops == ()
    assert history_of(ended(began(), 9, "error")).stops == ()


def test_several_in_a_row() -> None:
    """Each stop lies between its own two attempts; a run that finished was not stopped again."""
    last = RankLog(pid=3, restart_count=2).trains(40, attempt=3, step=70)
    last.add(EventKind.RUN_FINISHED, 50, attempt=3)
    again = second().stop(30, step=75, attempt=2, reason="time_limit")
    history = history_of(first(), again, ended(last, 50, "finished"))
    stops = [(stop.attempt, stop.step, stop.steps_lost) for stop in history.stops]
    assert stops == [(1, 40, 0), (2, 75, 5)]
    figures = figures_of(history).stops
    assert (figures.count, figures.incomplete, figures.steps_lost_total) == (2, 0, 5)
    assert figures.by_reason == {"preempted": 1, "time_limit": 1}
    assert figures.at_least is False
    assert [row.at_s for row in figures.every_stop] == pytest.approx([10, 30])
    assert figures_of(history).stop_requests == 4


def test_killed_without_a_word() -> None:
    """An attempt that left only its steps, and that another one follows, lost what it is known to
    have made beyond the step that the next one began with."""
    history = history_of(saved(began().at_step(55), 50, 9), second(50))
    (stop,) = history.stops
    assert (stop.left, stop.signal, stop.reason, stop.durable_ms) == ("killed", None, None, None)
    assert (stop.step, stop.step_from, stop.steps_lost) == (55, "last_event", 5)
    assert stop.waited_s == pytest.approx(11)
    assert "stop_requested" in stop.missing
    figures = figures_of(history).stops
    assert (figures.killed, figures.steps_lost_total, figures.at_least) == (1, 5, True)
    assert figures.by_reason == {"killed": 1}


def test_two_ranks() -> None:
    """Each rank has its own stop; the run has lost what the rank has that lost the most."""
    logs = []
    for rank, begins in enumerate((40, 37)):
        logs.append(RankLog(rank=rank, pid=10 + rank).trains(0, attempt=1).stop(10, step=40))
        after = RankLog(rank=rank, pid=20 + rank, restart_count=1)
        logs.append(after.trains(20, attempt=2, step=begins))
    history = history_of(*logs)
    assert [(stop.rank, stop.steps_lost) for stop in history.stops] == [(0, 0), (1, 3)]
    figures = figures_of(history).stops
    assert (figures.count, figures.steps_lost_total) == (2, 3)


def test_a_date_set_back_in_between() -> None:
    """How long was waited is not known, and the attempts keep their order."""
    history = history_of(first(), second(date_off_s=-3600.0).stop(30, step=70, attempt=2))
    assert [stop.attempt for stop in history.stops] == [1, 2]
    assert (history.stops[0].waited_s, history.stops[0].steps_lost) == (None, 0)


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
