"""Stops in the table for the terminal and in the picture."""

from __future__ import annotations

import io

from matplotlib.figure import Figure
from report.ranklog import RankLog
from rich.console import Console

from hydroslurm.core.events import EventKind
from hydroslurm.report.history import History
from hydroslurm.report.lives import lives_of
from hydroslurm.report.table import report_view
from hydroslurm.report.timeline import timeline


def history_of(*logs: RankLog) -> History:
    return History(name="run", lives=lives_of(event for log in logs for event in log.events))


def three_lives() -> History:
    """Preempted without loss, then killed 5 steps behind its last checkpoint."""
    killed = RankLog(pid=2, restart_count=1).trains(20, life=2, step=40)
    killed.step = 75
    killed.add(EventKind.SAVE_SKIPPED, 30)
    return history_of(
        RankLog(pid=1).trains(0, life=1).stop(10, step=40),
        killed,
        RankLog(pid=3, restart_count=2).trains(45, life=3, step=70).uninstalled(60),
    )


def shown(run: History, *, width: int = 80, max_rows: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(report_view(run, max_rows=max_rows))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_rows() -> None:
    """A row per stop with its parts and what was lost; a bound is shown as one."""
    lines = shown(three_lives())
    rows = [line.split() for line in lines if " preempted " in line or " killed  " in line]
    assert rows == [
        ["10.0", "0", "1", "preempted", "20", "50", "60", "9.9", "2.5", "40", "0"],
        ["30.0", "0", "2", "killed", "–", "–", "–", "15.0", "2.5", "≥", "75", "≥", "5"],
    ]
    assert "Steps lost: at least 5." in lines
    assert "Life 2 of rank 0 was killed without a word." in lines
    assert not any("Nothing was paused" in line for line in lines)


def test_every_column_fits_into_80() -> None:
    """Days of training and millions of steps still leave every heading and number whole."""
    log = RankLog(pid=1).trains(123456, life=1).stop(223456.7, step=1234567, reason="time_limit")
    after = RankLog(pid=2, restart_count=1).trains(223600, life=2, step=1234567)
    lines = shown(history_of(log, after))
    row = next(line for line in lines if "time_limit" in line)
    assert row.split()[:4] == ["100001", "0", "1", "time_limit"]
    assert row.split()[-2:] == ["1,234,567", "0"]
    assert not any("…" in line for line in lines)


def test_many_stops_are_cut_and_torn_ones_named() -> None:
    """Only so many rows; the figures are of all; what is missing is said, and not for ever."""
    logs = [
        RankLog(pid=life, restart_count=life)
        .trains(30 * life, life=life, step=20 * life)
        .stop(30 * life + 9, step=20 * life + 20, life=life, without=("requeued",))
        for life in range(1, 13)
    ]
    lines = shown(history_of(*logs), max_rows=4)
    assert sum(" preempted " in line for line in lines) == 4
    assert "8 later stops are left out; the figures below are of all." in lines
    assert sum("wrote no requeued" in line for line in lines) == 5
    assert "7 more stops are incomplete: see figures.json." in lines


def test_picture_of_lives_and_gaps() -> None:
    """Starts, stops, saves and first steps are drawn, and each gap tells what it cost."""
    figure = timeline(three_lives())
    found = texts(figure)
    assert {"saved in\n50 ms", "9.9 s", "killed\n≥ 5 steps\nlost", "15.0 s"} <= set(found)
    assert {"life 1", "life 2", "life 3"} <= set(found)
    wanted = {"first step", "stop requested", "saved", "between two lives", "no more events"}
    assert wanted <= set(legend(figure))
    assert "stops: 2" in figure.axes[0].get_title(loc="left")
    assert "nothing was paused" not in found


def test_marks_differ_without_colour() -> None:
    """Each mark has a shape of its own, and the start of a life a hatching."""
    figure = timeline(three_lives())
    marks = [h for h in figure.legends[0].legend_handles if hasattr(h, "get_marker")]
    shapes = [h.get_marker() for h in marks if h.get_marker() != "None"]
    assert len(shapes) == len(set(shapes)) == 3
    starting = next(h for h in figure.legends[0].legend_handles if "starting" in h.get_label())  # type: ignore[union-attr]
    assert starting.get_hatch()  # type: ignore[union-attr]


def test_gaps_without_room_are_counted() -> None:
    """Where the labels of gaps find no room the picture says how many there were."""
    logs = [
        RankLog(pid=life, restart_count=life)
        .trains(100 * life, life=life, step=20 * life)
        .stop(100 * life + 98, step=20 * life + 20, life=life)
        for life in range(40)
    ]
    figure = timeline(history_of(*logs))
    assert "39 labels left out" in figure.axes[0].get_xlabel()
