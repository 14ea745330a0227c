"""What is shown of a pause that vacated: after the run, and while the memory is away. From the
events that a real rank has written (recorded/README.md), and from logs made by hand."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.colors import to_rgba
from prometheus_client import generate_latest
from report.ranklog import RankLog
from report.test_page_and_trace import check
from report.views import figures_of, history_of, legend, shown
from statusfile import write_status

from hydroslurm.cli.status import rank_line
from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir, comment_for
from hydroslurm.core.status import read_status
from hydroslurm.observe.metrics import JobCollector
from hydroslurm.observe.table import TOP, as_json
from hydroslurm.observe.watcher import Watcher
from hydroslurm.report.attempts import attempts_of
from hydroslurm.report.figures import figures_text
from hydroslurm.report.history import History
from hydroslurm.report.timeline import timeline
from hydroslurm.report.timeline_lanes import vacated_of
from hydroslurm.report.trace import trace_of
from hydroslurm.slurm.values import Job, JobState

RECORDED = Path(__file__).parent / "recorded" / "vacated.jsonl"
HOST, WAY = "device memory on the host", "device memory on its way"
MOVED_BYTES = 234_881_024


def recorded() -> list[Event]:
    return list(read_events(RECORDED))


def recorded_history() -> History:
    return History(name="run", attempts=attempts_of(recorded()))


def vacates(log: RankLog, *, leaves_s: float, gone_s: float, **back_s: float) -> RankLog:
    """Beside a pause, the lines of its vacate; ``back_s``: when it returns and is back, if ever."""
    data = {"pause": 1, "moved_bytes": 8 * 10**9, "moved_s": gone_s - leaves_s}
    log.add(EventKind.VACATED, gone_s, **data, vacate_s=gone_s - leaves_s)
    if back_s:
        took_s = back_s["back"] - back_s["returns"]
        log.add(EventKind.RESTORED, back_s["back"], **data, restore_s=took_s)
    log.events.sort(key=lambda one: one.mono_ns)
    return log


def test_the_resume_of_a_vacated_pause_begins_with_the_request() -> None:
    """Not when the vacate opens the gate itself, after the memory is back: 0.35 s, not 8 µs. The
    terminal has bytes and both times; figures.json holds the pause."""
    (pause,) = recorded_history().pauses
    assert pause.vacated_bytes == MOVED_BYTES
    assert (pause.vacate_s, pause.restore_s) == pytest.approx((0.0165, 0.3541), abs=1e-4)
    assert pause.resume_us == pytest.approx(354_867, abs=1)
    assert pause.resume_requested_mono_ns is not None
    assert pause.restored_mono_ns is not None
    assert pause.resume_requested_mono_ns < pause.restored_mono_ns
    plain = RankLog().installed().pause(1, cause="user", resume_us=40)
    assert history_of(plain).pauses[0].resume_us == 40
    text = "\n".join(shown(recorded_history(), width=140))
    row = next(line for line in text.splitlines() if "aten::" in line).split()
    assert [cell for cell in ("0.23", "0.02", "0.35", "354,867") if cell not in row] == []
    told = json.loads(figures_text(figures_of(recorded_history())))
    assert told["resume_us"]["max"] == pytest.approx(354_867, abs=1)


def test_the_picture_draws_the_vacated_part() -> None:
    """A shade of its own for the time on the host, another for the way, both in the legend; where
    they are, is where the events are. A picture without vacates has neither."""
    history = recorded_history()
    figure = timeline(history)
    assert {HOST, WAY} <= set(legend(figure))
    yellow = [
        one for one in figure.axes[0].patches + figure.axes[0].artists
        if hasattr(one, "get_facecolor") and tuple(one.get_facecolor()) == to_rgba("#F0E442")
    ]  # fmt: skip
    (drawn,) = yellow
    (attempt,) = history.attempts
    (pause,) = history.pauses
    one = vacated_of(attempt, pause)
    assert one is not None
    corners = drawn.get_path().vertices
    assert min(corners[:, 0]) == pytest.approx(history.since_begin_s(attempt, one.gone))
    assert max(corners[:, 0]) == pytest.approx(history.since_begin_s(attempt, one.returns))
    assert min(corners[:, 1]) == 0.0  # the lower half: the cause is seen above it
    plain = timeline(history_of(RankLog().installed().pause(1, cause="user").uninstalled(5)))
    assert not {HOST, WAY} & set(legend(plain))


@pytest.mark.parametrize("way", ["back", "never back", "parked to the end"])
def test_memory_that_does_not_come_back_is_away_to_the_end(way: str) -> None:
    """Of a rank that was killed, or has lost its memory, it is on the host until its last event."""
    until = "parked" if way == "parked to the end" else "first_operator_released"
    log = RankLog().installed().pause(1, for_s=5, until=until)
    back = {"returns": 4.0, "back": 5.5} if way == "back" else {}
    log = vacates(log, leaves_s=1.5, gone_s=3.0, **back)
    history = history_of(log.add(EventKind.STOP_REQUESTED, 9, signal="SIGTERM"))
    (attempt,) = history.attempts
    one = vacated_of(attempt, attempt.pauses[0])
    assert one is not None
    at_s = [history.since_begin_s(attempt, at) for at in one]
    ends_s = {"back": [4, 5.5], "never back": [6, 6], "parked to the end": [9, 9]}[way]
    assert at_s == pytest.approx([1.5, 3, *ends_s], abs=1e-3)
    timeline(history)


def test_the_trace_keeps_the_format() -> None:
    """``vacating`` and ``restoring`` are slices with bytes, inside ``parked``; also where the drain
    took into the vacate, which waits for the device itself."""
    drains = RankLog().installed().pause(1, for_s=5)
    drains.add(EventKind.DRAINED, 2.5, pause=1, drain_us=1.5e6)
    overlapping = vacates(drains, leaves_s=2.0, gone_s=3.0, returns=4.0, back=5.0)
    for history in (recorded_history(), history_of(overlapping.uninstalled(9))):
        entries = check(trace_of(history))
        slices = {entry["name"]: entry for mine in entries.values() for entry in mine}
        assert slices["vacating"]["args"]["bytes"] in (MOVED_BYTES, 8 * 10**9)
        parked = slices["parked"]
        for name in ("vacating", "restoring"):
            one = slices[name]
            assert parked["ts"] <= one["ts"]
            assert one["ts"] + one["dur"] <= parked["ts"] + parked["dur"]


def test_status_top_and_metrics_while_it_is_away(tmp_path: Path) -> None:
    """The status that the rank's own events fold to: the line of ``status`` and ``describe``, the
    row of ``top``, the text for Prometheus; and again once the memory is back."""
    run = RunDir(tmp_path)
    log = run.rank_events(0)
    log.parent.mkdir(parents=True)
    events = [replace(one, host="n1", job_id=7) for one in recorded()]
    away = [one.kind for one in events].index(EventKind.VACATED) + 1
    running = Job(job_id=7, state=JobState.RUNNING, comment=comment_for(run))
    slurm: Any = SimpleNamespace(jobs=lambda **_: (running,))
    shows = []
    for some in (events[:away], events):
        log.write_text("".join(f"{one.to_json()}\n" for one in some))
        write_status(log)
        status = read_status(run.rank_status(0))
        assert status is not None
        watcher = Watcher(slurm, user=None, policies=False)
        (row,) = watcher.look().rows
        text = generate_latest(JobCollector(watcher, every_s=0).registry()).decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if "job_id=" in line)
        named = {key.split("{")[0]: float(value) for key, value in values.items()}
        shows.append((rank_line(status, now_epoch_ns=time.time_ns()), row, named))
    (line, row, named), (line_after, row_after, named_after) = shows
    assert "0.23 GB of device memory are on the host" in line
    assert (row.state, row.vacated_bytes) == ("VACATED", MOVED_BYTES)
    assert as_json(TOP, row)["vacated_bytes"] == MOVED_BYTES
    assert named["hydroslurm_job_vacated_bytes"] == MOVED_BYTES
    assert named["hydroslurm_job_vacate_seconds"] == pytest.approx(0.0165, abs=1e-4)
    assert "hydroslurm_job_restore_seconds" not in named
    assert "on the host" not in line_after
    assert (row_after.state, row_after.vacated_bytes) == ("RUNNING", 0)
    assert named_after["hydroslurm_job_vacated_bytes"] == 0
    assert named_after["hydroslurm_job_restore_seconds"] == pytest.approx(0.354, abs=1e-3)
