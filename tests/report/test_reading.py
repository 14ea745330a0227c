"""Event files of every size and state, with whatever lines, fields and bytes: what is read, and
what is named as missing."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report.ranklog import RankLog, as_read
from report.views import figures_of

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError
from hydroslurm.report import reading
from hydroslurm.report.attempts import attempts_of
from hydroslurm.report.figures import MOST_ROWS
from hydroslurm.report.histograms import Histogram, draw_histograms, histograms_of
from hydroslurm.report.history import History
from hydroslurm.report.lines import Unread, rank_events
from hydroslurm.report.reading import parallel_map, read_history
from hydroslurm.report.writing import write_histograms


def read(path: Path) -> tuple[list[Event], Unread]:
    unread = Unread()
    return list(rank_events(path, unread)), unread


def some(rank: int = 0) -> RankLog:
    log = RankLog(rank=rank, pid=10 + rank).trains(0, attempt=1).pause(4, cause="user")
    return log.stop(10, step=40)


def test_events_are_read_as_everywhere(run_dir: RunDir) -> None:
    """Line by line what ``read_events`` reads, texts with every kind of character included; a line
    with its kind and its clocks alone counts, as older writers had it."""
    log = some()
    log.add(EventKind.STOP_REASON, 11, message='é "quoted" \\ \n }} {"x"', reason="…\ud800")
    path = log.write(run_dir)
    lines, unread = read(path)
    assert lines == list(read_events(path))
    assert unread == Unread()
    row = {"v": 1, "kind": "gate_closed", "mono_ns": 5, "epoch_ns": 7}
    run_dir.rank_events(1).write_text(json.dumps(row) + "\n")
    ((line,), unread) = read(run_dir.rank_events(1))
    assert (line.rank, line.job_id, line.step, line.data) == (0, None, None, {})
    assert unread == Unread()
    json.dumps(figures_of(read_history(run_dir.root)).as_dict(), allow_nan=False)


def test_what_could_not_be_read_is_named(run_dir: RunDir) -> None:
    """Torn lines, lines of later versions, and ranks without a file are told apart."""
    log = some()
    log.add(EventKind.RANKS_JOINED, 0.5, world_size=3, joined_s=0.5)
    path = log.write(run_dir)
    newer = {**json.loads(log.events[0].to_json()), "v": 2}
    unknown = {**newer, "v": 1, "kind": "teleported"}
    with path.open("a") as file:
        file.write(f'{json.dumps(newer)}\n{json.dumps(unknown)}\n{{"v":1,"kind":"par')
    history = read_history(run_dir.root)
    assert len(history.attempts) == 1
    assert history.missing == (
        "Rank 0: torn lines that were passed over: 1.",
        "Rank 0: lines of a later version of hydroslurm, passed over: 2.",
        "Of 3 ranks 2 left no events: 1, 2.",
    )
    assert figures_of(history).missing[:3] == history.missing


def test_several_processes_read_the_same(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of a large run, read beside each other, make the history that one process reads."""
    for rank in range(3):
        some(rank).write(run_dir)
    alone = read_history(run_dir.root)
    monkeypatch.setattr(reading, "_PARALLEL_BYTES", 0)
    monkeypatch.setattr(reading.os, "sched_getaffinity", lambda _: {0, 1})
    together = read_history(run_dir.root)
    assert together == alone
    assert figures_of(together) == figures_of(alone)


def test_a_process_that_fails_is_heard() -> None:
    """What is raised in another process is raised where its result is taken; so is its death."""

    def work(item: int) -> bytes:
        if item == 1:
            raise OSError("no room")
        if item == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return b"x" * 200_000

    assert list(parallel_map(work, [0, 0])) == [b"x" * 200_000] * 2
    with pytest.raises(OSError, match="no room"):
        list(parallel_map(work, [0, 1]))
    with pytest.raises(RunFolderError, match="was killed"):
        list(parallel_map(work, [2]))


def test_rows_are_bounded_and_figures_are_of_all(run_dir: RunDir) -> None:
    """A run of many pauses keeps its percentiles, and says how many rows are not there."""
    log = RankLog().installed()
    for number in range(MOST_ROWS + 5):
        log.pause(1 + number, for_s=0.5, park_us=50 + (number == MOST_ROWS + 4) * 9000)
    log.write(run_dir)
    figures = figures_of(read_history(run_dir.root))
    assert (figures.pauses, len(figures.every_pause)) == (MOST_ROWS + 5, MOST_ROWS)
    assert figures.every_pause_left_out == 5
    assert figures.park_us["max"] == 9050
    assert figures.events == len(log.events)


def test_histograms_of_what_was_measured(run_dir: RunDir) -> None:
    """One histogram per latency with ten values that differ; none, and no file, where there are
    fewer. It tells how many values there are, and two percentiles, which the legend names."""
    some().write(run_dir)
    assert write_histograms(read_history(run_dir.root), run_dir.histograms_png) is None
    for rank in range(1, 11):
        log = RankLog(rank=rank, pid=100 + rank).trains(0, attempt=1)
        log.pause(3, cause="user", park_us=80 + rank, resume_us=40).stop(10 + rank, step=40)
        log.write(run_dir)
    history = read_history(run_dir.root)
    found = histograms_of(history)
    assert "pause: signal → parked" in [one.title for one in found]
    assert all(len(one.values_s) >= 10 for one in found)
    path = write_histograms(history, run_dir.histograms_png)
    assert path is not None
    assert path.read_bytes()[:4] == b"\x89PNG"
    figure = draw_histograms([Histogram("stop", tuple(n / 1000 for n in range(1, 101)), "r", "/")])
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "stop\nn = 100, median 50 ms, p99 99 ms"
    assert axes.patches
    assert len(figure.legends) == 1


def full_log() -> list[Event]:
    """Two ranks, two attempts each: pauses of all causes, and a stop."""
    events: list[Event] = []
    for rank in range(2):
        for restart in range(2):
            at_s = 50.0 * restart
            log = RankLog(rank=rank, pid=50 + restart, restart_count=restart)
            log.trains(at_s, attempt=restart + 1, step=20 * restart)
            for number, cause in enumerate(("slurm", "user", "api", "terminal")):
                log.pause(at_s + 5 * number + 3, cause=cause, held=number != 2)
            stopped = {"step": 20 * restart + 20, "attempt": restart + 1}
            events += log.stop(at_s + 30, **stopped).events
    return events


FULL = full_log()


def _figures(events: list[Event]) -> dict[str, Any]:
    """As JSON, which has finite numbers only."""
    history = History(name="x", attempts=attempts_of(events))
    figures: dict[str, Any] = json.loads(json.dumps(figures_of(history).as_dict(), allow_nan=False))
    assert figures["pauses"] == len(history.pauses) == len(figures["every_pause"])
    return figures


@given(
    kept=st.lists(st.sampled_from(range(len(FULL))), unique=True, max_size=len(FULL)),
    ordered=st.booleans(),
)
def test_any_lines_may_be_lost(kept: list[int], ordered: bool) -> None:
    """Whatever lines are left, in whatever order, no duration and no loss is negative."""
    figures = _figures([FULL[index] for index in (sorted(kept) if ordered else kept)])
    assert figures["incomplete"] <= figures["pauses"]
    for row in (*figures["every_pause"], *figures["stops"]["every_stop"]):
        values = [row[key] for key in row if key.endswith(("_us", "_ms", "_s")) and key != "at_s"]
        assert all(value is None or value >= 0 for value in [*values, row.get("steps_lost")])


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
OF_STOPS = ("step", "attempt", "checkpoint_step", "ending", "reason")
OF_PAUSES = ("pause", "causes", "requested_mono_ns", "park_us", "held", "operator", "signal")


@settings(max_examples=50)
@given(st.data(), st.lists(st.sampled_from(OF_STOPS)))
def test_any_values_of_the_fields_that_there_are(data: st.DataObject, names: list[str]) -> None:
    """Damaged fields never raise, and what comes out can be written as JSON."""
    events: list[Event] = []
    for event in FULL:
        fields = {name: data.draw(scalars) for name in names if name in event.data}
        step = data.draw(scalars) if fields else event.step
        events.append(dataclasses.replace(event, data={**event.data, **fields}, step=step))
    _figures(list(as_read(events)))


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(list(EventKind)),
            st.integers(-(2**62), 2**62),
            st.dictionaries(st.sampled_from(OF_PAUSES), values) | values,
            values,
        ),
        max_size=12,
    )
)
def test_any_events(rows: list[tuple[EventKind, int, Any, Any]]) -> None:
    """Of any kind, time and content."""
    events = [
        Event(kind=kind, mono_ns=mono_ns, epoch_ns=mono_ns // 2, step=step, data=data)
        for kind, mono_ns, data, step in rows
    ]
    _figures(list(as_read(events)))


@given(noise=st.lists(st.binary(max_size=30), max_size=5), cut=st.integers(0, 400))
def test_any_bytes_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, noise: list[bytes], cut: int
) -> None:
    """Bytes of any kind before the log, and a log cut off anywhere, can be read."""
    run_dir = RunDir(tmp_path_factory.mktemp("run"))
    path = RankLog().installed().pause(1).pause(3).write(run_dir)
    path.write_bytes(b"\n".join([*noise, path.read_bytes()])[: -cut or None])
    assert len(read_history(run_dir.root).pauses) <= 2
