"""Events -> stops: whole, torn, killed, several ranks, and with the date set in between."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report.ranklog import RankLog, as_read
from report.views import figures_of, history_of

from hydroslurm.core.events import Event, EventKind
from hydroslurm.report.attempts import attempts_of
from hydroslurm.report.history import History
from hydroslurm.report.stops import Stop


def first(**options: Any) -> RankLog:
    return RankLog(pid=1, **options).trains(0, attempt=1)


def second(**options: Any) -> RankLog:
    return RankLog(pid=2, restart_count=1, **options)


def only_stop(*logs: RankLog) -> Stop:
    (stop,) = history_of(*logs).stops
    return stop


def test_whole() -> None:
    """Every part of a stop is measured from the first request, and no step is lost; of a reason
    that is told twice the first counts."""
    stopped = first().stop(10, step=40)
    stopped.add(EventKind.STOP_REASON, 10.09, reason="asked", message="told again")
    stop = only_stop(stopped, second().trains(20, attempt=2, step=40))
    assert (stop.complete, stop.missing, stop.left) == (True, (), "preempted")
    assert (stop.signal, stop.reason, stop.message) == ("SIGTERM", "preempted", "in words")
    assert (stop.attempt, stop.step, stop.step_from, stop.next_step) == (1, 40, "safe_point", 40)
    parts = [stop.safe_point_ms, stop.staged_ms, stop.written_ms, stop.durable_ms, stop.requeued_ms]
    assert parts == pytest.approx([20, 30, 45, 50, 60], abs=0.01)
    assert (stop.waited_s, stop.first_step_s) == pytest.approx((9.9, 2.5), abs=0.001)
    assert (stop.steps_lost, stop.steps_lost_exactly, stop.state_bytes) == (0, True, 1000)


def test_several_in_a_row() -> None:
    """Each stop lies between its own two attempts; a run that finished was not stopped again."""
    last = RankLog(pid=3, restart_count=2).trains(40, attempt=3, step=70)
    last.add(EventKind.RUN_FINISHED, 50, attempt=3)
    last.add(EventKind.ATTEMPT_ENDED, 50, attempt=3, ending="finished").uninstalled(51)
    history = history_of(
        first().stop(10, step=40),
        second().trains(20, attempt=2, step=40).stop(30, step=75, attempt=2, reason="time_limit"),
        last,
    )
    assert [(stop.attempt, stop.step, stop.steps_lost) for stop in history.stops] == [
        (1, 40, 0),
        (2, 75, 5),
    ]
    figures = figures_of(history).stops
    assert (figures.count, figures.incomplete, figures.steps_lost_total) == (2, 0, 5)
    assert figures.by_reason == {"preempted": 1, "time_limit": 1}
    assert figures.at_least is False
    assert [row.at_s for row in figures.every_stop] == pytest.approx([10, 30])
    assert figures_of(history).stop_requests == 4


@pytest.mark.parametrize(
    ("until", "missing"),
    [
        ("stop_requested", ("stop_reason", "safe_point", "save_committed", "attempt_ended")),
        ("safe_point", ("save_committed", "attempt_ended")),
        ("save_staged", ("save_committed", "attempt_ended")),
        ("save_committed", ("attempt_ended",)),
        ("attempt_ended", ("requeued",)),
    ],
)
def test_killed_on_the_way(until: str, missing: tuple[str, ...]) -> None:
    """An attempt that was killed while it saved says what is missing; what it lost is counted."""
    stop = only_stop(
        first().stop(10, step=40, until=until), second().trains(20, attempt=2, step=30)
    )
    assert stop.missing == missing
    assert stop.left == ("preempted" if until == "attempt_ended" else "killed")
    assert stop.steps_lost == (9 if until == "stop_requested" else 10)
    assert stop.steps_lost_exactly == (until != "stop_requested")


@pytest.mark.parametrize("torn", ["stop_requested", "stop_reason", "safe_point", "requeued"])
def test_torn(torn: str) -> None:
    """A line that is lost is named, and nothing is put in its place."""
    log = first().stop(10, step=40, without=(torn,))
    if torn == "stop_requested":
        assert all(event.kind is not EventKind.STOP_REQUESTED for event in log.events)
    stop = only_stop(log, second().trains(20, attempt=2, step=40))
    assert stop.missing == (torn,)
    assert (stop.requeued_ms is None) == (torn in ("requeued", "stop_requested"))
    assert (stop.safe_point_ms is None) == (torn in ("safe_point", "stop_requested"))
    assert (stop.durable_ms is None) == (torn == "stop_requested")
    assert stop.reason == (None if torn == "stop_reason" else "preempted")
    assert (stop.steps_lost, stop.step) == (0, 40)


def test_killed_without_a_word() -> None:
    """An attempt that left only its steps, and that another one follows, lost what it is known to
    have made beyond the step that the next one began with."""
    log = first()
    log.step = 55
    log.add(EventKind.SAVE_COMMITTED, 9, checkpoint_step=50, save_kind="periodic")
    history = history_of(log, second().trains(20, attempt=2, step=50))
    (stop,) = history.stops
    assert (stop.left, stop.signal, stop.reason, stop.durable_ms) == ("killed", None, None, None)
    assert (stop.step, stop.step_from, stop.steps_lost) == (55, "last_event", 5)
    assert stop.waited_s == pytest.approx(11)
    assert "stop_requested" in stop.missing
    figures = figures_of(history).stops
    assert (figures.killed, figures.steps_lost_total, figures.at_least) == (1, 5, True)
    assert figures.by_reason == {"killed": 1}


def test_still_running_or_never_followed() -> None:
    """An attempt without an end that nobody followed may still run: that is no stop."""
    assert history_of(first()).stops == ()


def test_an_error_that_was_run_again() -> None:
    """An attempt that ended by an exception counts when another one went on; it had no request."""
    log = first()
    log.step = 60
    log.add(EventKind.ATTEMPT_ENDED, 9, attempt=1, ending="error").uninstalled(9.1)
    assert history_of(log).stops == ()
    stop = only_stop(log, second().trains(20, attempt=2, step=50))
    assert (stop.left, stop.missing, stop.steps_lost) == ("error", (), 10)


def test_cancelled_is_not_requeued() -> None:
    """A stop that nothing follows has no later parts, and misses none of them."""
    log = first().stop(10, step=40, reason="cancelled", without=("requeue_asked", "requeued"))
    stop = only_stop(log)
    assert (stop.complete, stop.left) == (True, "cancelled")
    assert (stop.requeued_ms, stop.waited_s, stop.steps_lost) == (None, None, None)
    assert stop.steps_lost_exactly


def test_finished_inside_the_grace() -> None:
    """Asked to stop, it came to its end: nothing is lost, also if Slurm starts it once more."""
    log = first()
    log.add(EventKind.STOP_REQUESTED, 10, signal="SIGTERM", requested_mono_ns=log.mono_ns(10))
    log.add(EventKind.ATTEMPT_ENDED, 11, attempt=1, ending="finished").uninstalled(11.1)
    stop = only_stop(log, second().installed(20).uninstalled(21))
    assert (stop.left, stop.missing, stop.steps_lost) == ("finished", (), 0)


def test_outside_of_a_job() -> None:
    """A plain process is asked no reason by anybody and is not requeued."""
    log = first(job_id=None).stop(
        10, step=40, reason="asked", without=("stop_reason", "requeue_asked", "requeued")
    )
    stop = only_stop(log, RankLog(pid=2, job_id=None).trains(13, attempt=2, step=40))
    assert (stop.complete, stop.reason, stop.left, stop.steps_lost) == (True, None, "asked", 0)


def test_requeue_that_failed() -> None:
    """Slurm's refusal is told instead of a requeue."""
    log = first().stop(10, step=40, until="requeue_asked")
    log.add(EventKind.REQUEUE_FAILED, 10.06, reason="Access denied").uninstalled(10.1)
    stop = only_stop(log)
    assert (stop.missing, stop.requeued_ms, stop.requeue_error) == ((), None, "Access denied")


def test_saved_already() -> None:
    """A step that was committed before the stop was asked for is durable at once."""
    log = first()
    log.step = 40
    log.add(EventKind.SAVE_COMMITTED, 9, checkpoint_step=40, save_kind="periodic")
    log.stop(10, step=40, without=("save_started", "save_staged", "save_committed"))
    stop = only_stop(log, second().trains(20, attempt=2, step=40))
    assert (stop.durable_ms, stop.staged_ms, stop.missing) == (0.0, None, ())


def test_older_save_is_not_the_stops() -> None:
    """The commit of another step, before or after the request, is not that of the stop."""
    log = first()
    log.add(EventKind.SAVE_COMMITTED, 10.03, checkpoint_step=30, save_kind="periodic")
    log.stop(10, step=40, without=("save_committed",))
    stop = only_stop(log, second().trains(20, attempt=2, step=30))
    assert (stop.durable_ms, stop.missing, stop.steps_lost) == (None, ("save_committed",), 10)


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


@pytest.mark.parametrize(("off_s", "waited_s"), [(-3600.0, None), (3600.0, 3609.9)])
def test_date_set_in_between(off_s: float, waited_s: float | None) -> None:
    """What lies within an attempt is right all the same. Between two it is what the date says; set
    back, it is not known, and the attempts keep their order."""
    last = second(date_off_s=off_s).trains(20, attempt=2, step=40).stop(30, step=70, attempt=2)
    history = history_of(first().stop(10, step=40), last)
    assert [stop.attempt for stop in history.stops] == [1, 2]
    stop = history.stops[0]
    assert (stop.durable_ms, stop.first_step_s) == pytest.approx((50, 2.5), abs=0.01)
    assert stop.waited_s == (None if waited_s is None else pytest.approx(waited_s))
    assert stop.steps_lost == 0


def test_without_a_run() -> None:
    """Where only pausing was installed a stop is a request and an end; nothing else is missed."""
    log = RankLog(pid=1).installed().pause(2)
    log.add(EventKind.STOP_REQUESTED, 6, signal="SIGTERM", requested_mono_ns=log.mono_ns(6))
    stop = only_stop(log, second().installed(20))
    assert (stop.left, stop.missing, stop.steps_lost) == ("killed", (), None)
    assert not stop.steps_lost_exactly
    assert stop.waited_s == pytest.approx(14)


FULL = [
    event
    for rank in range(2)
    for attempt in range(3)
    for event in RankLog(rank=rank, pid=50 + attempt, restart_count=attempt)
    .trains(30 * attempt, attempt=attempt + 1, step=20 * attempt)
    .stop(30 * attempt + 9, step=20 * attempt + 20, attempt=attempt + 1)
    .events
]


@given(
    kept=st.lists(st.sampled_from(range(len(FULL))), unique=True, max_size=len(FULL)),
    ordered=st.booleans(),
)
def test_any_lines_may_be_lost(kept: list[int], ordered: bool) -> None:
    """Whatever lines are left, in whatever order, no duration and no loss is negative."""
    events = [FULL[index] for index in (sorted(kept) if ordered else kept)]
    figures = figures_of(History(name="x", attempts=attempts_of(events)))
    for row in json.loads(json.dumps(figures.as_dict(), allow_nan=False))["stops"]["every_stop"]:
        values = [row[key] for key in row if key.endswith(("_ms", "_s")) and key != "at_s"]
        assert all(value is None or value >= 0 for value in [*values, row["steps_lost"]])


damaged = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text()


@settings(max_examples=100)
@given(
    st.data(),
    st.lists(st.sampled_from(["step", "attempt", "checkpoint_step", "ending", "reason"])),
)
def test_any_fields(data: st.DataObject, names: list[str]) -> None:
    """Fields of any type and value never raise, and what comes out can be written as JSON."""
    events: list[Event] = []
    for event in FULL:
        fields = {name: data.draw(damaged) for name in names if name in event.data}
        step = data.draw(damaged) if fields else event.step
        events.append(dataclasses.replace(event, data={**event.data, **fields}, step=step))
    json.dumps(
        figures_of(History(name="x", attempts=attempts_of(as_read(events)))).as_dict(),
        allow_nan=False,
    )
