"""History -> timeline.png, and the tables for the terminal: pauses, and stops."""

from __future__ import annotations

import struct

import pytest
from report.ranklog import RankLog
from report.views import history_of, legend, shown, texts

from hydroslurm.core.events import EventKind
from hydroslurm.core.rundir import RunDir
from hydroslurm.report.attempts import attempts_of
from hydroslurm.report.history import History
from hydroslurm.report.reading import read_history
from hydroslurm.report.timeline import timeline
from hydroslurm.report.writing import write_timeline


def history(ranks: int, pauses: int) -> History:
    events = []
    for rank in range(ranks):
        log = RankLog(rank=rank, pid=100 + rank).installed()
        for number in range(pauses):
            log.pause(1 + 5 * number, for_s=2, park_us=101 + number)
        events += log.uninstalled(5 * pauses + 3).events
    return History(name="run", attempts=attempts_of(events))


@pytest.mark.parametrize(("ranks", "pauses"), [(0, 0), (8, 60)])
def test_a_picture_and_the_latency_of_every_pause(run_dir: RunDir, ranks: int, pauses: int) -> None:
    """A PNG of a size that fits a page: as wide as ever, higher with more ranks. Up to 60 pauses on
    a rank each have their label, in µs; the axis names its unit."""
    path = write_timeline(history(ranks, pauses), run_dir.timeline_png)
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    assert width == 1440
    assert 250 <= height <= 250 + 160 * max(1, ranks)
    assert [entry.name for entry in run_dir.report.iterdir()] == ["timeline.png"]
    if pauses:
        figure = timeline(history(ranks, pauses))
        found = texts(figure)
        assert [found.count(f"{101 + number} µs") for number in range(pauses)] == [ranks] * pauses
        assert figure.axes[0].get_xlabel() == "time since the run's first event (s)"
        assert "parked: slurm" in legend(figure)


def attempts(number: int, each_s: int, **stop: tuple[str, ...]) -> History:
    """So many attempts of a rank, each but the last a stop later."""
    return history_of(
        *(
            RankLog(pid=attempt, restart_count=attempt)
            .trains(each_s * attempt, attempt=attempt, step=20 * attempt)
            .stop(each_s * attempt + each_s - 2, step=20 * attempt + 20, attempt=attempt, **stop)
            for attempt in range(1, number + 1)
        )
    )


def three_attempts() -> History:
    """Preempted without loss, then killed 5 steps behind its last checkpoint."""
    killed = RankLog(pid=2, restart_count=1).trains(20, attempt=2, step=40).at_step(75)
    return history_of(
        RankLog(pid=1).trains(0, attempt=1).stop(10, step=40),
        killed.add(EventKind.SAVE_SKIPPED, 30),
        RankLog(pid=3, restart_count=2).trains(45, attempt=3, step=70).uninstalled(60),
    )


def test_a_grey_print_can_be_read() -> None:
    """Each cause has a hatching of its own, each mark a shape, and the start of an attempt, too."""
    log = RankLog().installed()
    for number, cause in enumerate(("slurm", "user", "api", "terminal")):
        log.pause(1 + 5 * number, cause=cause, for_s=2)
    handles = timeline(history_of(log.uninstalled(30))).legends[0].legend_handles
    hatches = [h.get_hatch() for h in handles if h.get_label().startswith("parked")]  # type: ignore[union-attr]
    assert len(hatches) == len({*hatches} - {None}) == 4
    handles = timeline(three_attempts()).legends[0].legend_handles
    shapes = [h.get_marker() for h in handles if hasattr(h, "get_marker")]
    shapes = [shape for shape in shapes if shape != "None"]
    assert len(shapes) == len(set(shapes)) == 3
    assert next(h for h in handles if "starting" in h.get_label()).get_hatch()  # type: ignore[union-attr]


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


def test_rows_of_pauses(run_dir: RunDir) -> None:
    """A row tells cause, the two latencies, the parked time and the operator."""
    log = RankLog().installed().pause(2, cause="user", park_us=1530, for_s=2.5, resume_us=41)
    log.pause(6, until="parked").write(run_dir)
    output = "\n".join(shown(read_history(run_dir.root), width=110))
    row = next(line for line in output.splitlines() if "aten::linear" in line)
    assert row.split() == ["2.00", "0", "1", "user", "1,530", "2.498", "41", "aten::linear"]
    assert "not resumed" in output
    assert "job 7, 1 rank" in output


def test_where_there_are_no_rows(run_dir: RunDir) -> None:
    """A sentence instead of a table; a rank whose handlers were lost is not said to have had no
    pause."""
    assert any("No events yet" in line for line in shown(history(0, 0)))
    assert any("Nothing was paused" in line for line in shown(history(1, 0)))
    deaf = RankLog().installed().add(EventKind.UNINSTALLED, 9, handlers_replaced_by_others=2)
    deaf.write(run_dir)
    said = " ".join(" ".join(shown(read_history(run_dir.root))).split())
    assert "Nothing was paused" not in said
    assert "Rank 0: other code replaced hydroslurm's handlers of 2 signals: pauses" in said


def test_rows_of_stops() -> None:
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


def test_many_stops_are_cut_and_torn_ones_named() -> None:
    """Only so many rows; the figures are of all; what is missing is said, and not for ever."""
    lines = shown(attempts(12, 30, without=("requeued",)), max_rows=4)
    assert sum(" preempted " in line for line in lines) == 4
    assert "8 later stops are left out; the figures below are of all." in lines
    assert sum("wrote no requeued" in line for line in lines) == 5
    assert "7 more stops are incomplete: see figures.json." in lines
