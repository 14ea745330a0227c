"""Stops in the table for the terminal and in the picture."""

from __future__ import annotations

from report.ranklog import RankLog
from report.views import history_of, legend, shown, texts

from hydroslurm.core.events import EventKind
from hydroslurm.report.history import History
from hydroslurm.report.timeline import timeline


def three_attempts() -> History:
    """Preempted without loss, then killed 5 steps behind its last checkpoint."""
    killed = RankLog(pid=2, restart_count=1).trains(20, attempt=2, step=40)
    killed.step = 75
    killed.add(EventKind.SAVE_SKIPPED, 30)
    return history_of(
        RankLog(pid=1).trains(0, attempt=1).stop(10, step=40),
        killed,
        RankLog(pid=3, restart_count=2).trains(45, attempt=3, step=70).uninstalled(60),
    )


def test_rows() -> None:
    """A row per stop with its parts and what was lost; a bound is shown as one."""
    lines = shown(three_attempts())
    rows = [line.split() for line in lines if " preempted " in line or " killed  " in line]
    assert rows == [
        ["10.0", "0", "1", "preempted", "20", "50", "60", "9.9", "2.5", "40", "0"],
        ["30.0", "0", "2", "killed", "–", "–", "–", "15.0", "2.5", "≥", "75", "≥", "5"],
    ]
    assert "Steps lost: at least 5." in lines
    assert "Attempt 2 of rank 0 was killed without warning." in lines
    assert not any("Nothing was paused" in line for line in lines)


def test_every_column_fits_into_80() -> None:
    """Days of training and millions of steps still leave every heading and number whole."""
    log = RankLog(pid=1).trains(123456, attempt=1).stop(223456.7, step=1234567, reason="time_limit")
    after = RankLog(pid=2, restart_count=1).trains(223600, attempt=2, step=1234567)
    lines = shown(history_of(log, after))
    row = next(line for line in lines if "time_limit" in line)
    assert row.split()[:4] == ["100001", "0", "1", "time_limit"]
    assert row.split()[-2:] == ["1,234,567", "0"]
    assert not any("…" in line for line in lines)


def test_many_stops_are_cut_and_torn_ones_named() -> None:
    """Only so many rows; the figures are of all; what is missing is said, and not for ever."""
    logs = [
        RankLog(pid=attempt, restart_count=attempt)
        .trains(30 * attempt, attempt=attempt, step=20 * attempt)
        .stop(30 * attempt + 9, step=20 * attempt + 20, attempt=attempt, without=("requeued",))
        for attempt in range(1, 13)
    ]
    lines = shown(history_of(*logs), max_rows=4)
    assert sum(" preempted " in line for line in lines) == 4
    assert "8 later stops are left out; the figures below are of all." in lines
    assert sum("wrote no requeued" in line for line in lines) == 5
    assert "7 more stops are incomplete: see figures.json." in lines


def test_picture_of_attempts_and_gaps() -> None:
    """Starts, stops, saves and first steps are drawn, and each gap tells what it cost."""
    figure = timeline(three_attempts())
    found = texts(figure)
    assert {"saved in\n50 ms", "9.9 s", "killed\n≥ 5 steps\nlost", "15.0 s"} <= set(found)
    assert {"attempt 1", "attempt 2", "attempt 3"} <= set(found)
    wanted = {"first step", "stop requested", "saved", "between two attempts", "no more events"}
    assert wanted <= set(legend(figure))
    assert "stops: 2" in figure.axes[0].get_title(loc="left")
    assert "nothing was paused" not in found


def test_marks_differ_without_colour() -> None:
    """Each mark has a shape of its own, and the start of an attempt a hatching."""
    figure = timeline(three_attempts())
    marks = [h for h in figure.legends[0].legend_handles if hasattr(h, "get_marker")]
    shapes = [h.get_marker() for h in marks if h.get_marker() != "None"]
    assert len(shapes) == len(set(shapes)) == 3
    starting = next(h for h in figure.legends[0].legend_handles if "starting" in h.get_label())  # type: ignore[union-attr]
    assert starting.get_hatch()  # type: ignore[union-attr]


def test_gaps_without_room_are_counted() -> None:
    """Where the labels of gaps find no room the picture says how many there were."""
    logs = [
        RankLog(pid=attempt, restart_count=attempt)
        .trains(100 * attempt, attempt=attempt, step=20 * attempt)
        .stop(100 * attempt + 98, step=20 * attempt + 20, attempt=attempt)
        for attempt in range(40)
    ]
    figure = timeline(history_of(*logs))
    assert "39 labels left out" in figure.axes[0].get_xlabel()
