"""Events -> attempts and pauses: complete, torn, several attempts in one file, damaged lines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report.ranklog import RankLog, as_read
from report.views import figures_of

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError
from hydroslurm.report.attempts import attempts_of
from hydroslurm.report.history import History
from hydroslurm.report.pauses import Pause
from hydroslurm.report.reading import read_history


def only_pause(log: RankLog) -> Pause:
    (attempt,) = attempts_of(log.events)
    (pause,) = attempt.pauses
    return pause


def test_complete_pause() -> None:
    """Every field of a pause comes from its own events."""
    log = RankLog(rank=3, restart_count=2, step=17).installed()
    log.pause(4.0, for_s=2.0, park_us=80, resume_us=40).uninstalled(9)
    pause = only_pause(log)
    assert pause.complete
    assert pause.outcome == "complete"
    assert (pause.rank, pause.number, pause.restart_count, pause.step) == (3, 1, 2, 17)
    assert (pause.causes, pause.signal) == (("slurm",), "SIGTSTP")
    assert (pause.operator, pause.phase) == ("aten::linear", "forward")
    assert (pause.park_us, pause.resume_us) == (80, 40)
    assert pause.parked_s == pytest.approx(2.0, abs=1e-3)
    stamps = [
        pause.requested_mono_ns,
        pause.closed_mono_ns,
        pause.held_mono_ns,
        pause.parked_mono_ns,
        pause.resume_requested_mono_ns,
        pause.resumed_mono_ns,
        pause.released_mono_ns,
    ]
    assert all(isinstance(stamp, int) for stamp in stamps)
    assert stamps == sorted(stamps)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("until", "outcome", "missing"),
    [
        ("gate_closed", "not parked", ("parked", "resumed")),
        ("first_operator_held", "not parked", ("parked", "resumed", "first_operator_released")),
        ("parked", "not resumed", ("resumed", "first_operator_released")),
        ("resumed", "incomplete", ("first_operator_released",)),
    ],
)
def test_killed_on_the_way(until: str, outcome: str, missing: tuple[str, ...]) -> None:
    """A process killed in the middle of a pause leaves one that says what is missing."""
    pause = only_pause(RankLog().installed().pause(1, until=until))
    assert pause.outcome == outcome
    assert pause.missing == missing


def test_quiet_rank() -> None:
    """Where no thread was held none can be released: complete, and resumed with the gate."""
    pause = only_pause(RankLog().installed().pause(1, held=False))
    assert pause.complete
    assert pause.operator is None
    assert pause.resume_us == pytest.approx(9, abs=0.01)


def test_withdrawn() -> None:
    """A pause that is resumed before it has parked has no latency and no parked time."""
    log = RankLog().installed()
    log.add(EventKind.GATE_CLOSED, 1, pause=1, causes=["user"], requested_mono_ns=log.mono_ns(1))
    log.add(EventKind.RESUMED, 2, pause=1, requested_mono_ns=log.mono_ns(2), parked_s=1.0)
    pause = only_pause(log)
    assert pause.outcome == "withdrawn"
    assert pause.park_us is None
    assert pause.parked_s is None


def test_late_release_belongs_to_its_own_pause() -> None:
    """A thread that is released after the next pause has begun counts for the first one."""
    log = RankLog().installed().pause(1, for_s=1).pause(2.5, for_s=1)
    released = next(e for e in log.events if e.kind is EventKind.FIRST_OPERATOR_RELEASED)
    log.events.remove(released)
    log.events.append(released)
    (attempt,) = attempts_of(log.events)
    assert [pause.resume_us for pause in attempt.pauses] == [40, 40]
    assert all(pause.complete for pause in attempt.pauses)


def test_signals_go_to_the_pause_they_asked_for() -> None:
    """A resume's signal, or one that came while running, is not that of the next pause."""
    log = RankLog().installed().pause(1, for_s=1, cause="slurm")
    log.add(EventKind.SIGNAL_RECEIVED, 3, signal="SIGCONT", sender_pid=1, count=1)
    log.pause(4, for_s=1, cause="api")
    log.add(EventKind.SIGNAL_RECEIVED, 6, signal="SIGCONT", sender_pid=1, count=1)
    log.pause(7, for_s=1, cause="user")
    (attempt,) = attempts_of(log.events)
    assert [pause.signal for pause in attempt.pauses] == ["SIGTSTP", None, "SIGUSR1"]


def test_causes_add_up() -> None:
    """A cause that joins while the gate is closed is the pause's too, in order of appearance."""
    log = RankLog().installed()
    log.add(EventKind.GATE_CLOSED, 1, pause=1, causes=["user"], requested_mono_ns=log.mono_ns(1))
    log.add(EventKind.CAUSES_CHANGED, 2, causes=["slurm", "user"])
    log.add(EventKind.CAUSES_CHANGED, 3, causes=["slurm"])
    log.add(EventKind.RESUMED, 4, pause=1, requested_mono_ns=log.mono_ns(4), causes=[])
    log.add(EventKind.CAUSES_CHANGED, 5, causes=["api"])
    assert only_pause(log).causes == ("user", "slurm")


def test_devices() -> None:
    """Draining is reported where there are devices: its time, or how long it was waited in vain."""
    log = RankLog().installed().pause(1)
    log.add(EventKind.DRAINED, 1.5, pause=1, devices=["cuda:0"], drain_us=310.0)
    assert only_pause(log).drain_us == 310
    log = RankLog().installed().pause(1)
    log.add(EventKind.NOT_DRAINED, 11, pause=1, devices=["cuda:0"], waited_s=10.0)
    assert only_pause(log).drain_us is None
    assert only_pause(log).undrained_s == 10


def test_two_attempts_in_one_file(run_dir: RunDir) -> None:
    """After a requeue the pauses are numbered anew, and belong to another attempt of the rank."""
    first = RankLog(pid=10).installed().pause(1).pause(3, until="parked")
    second = RankLog(pid=11, restart_count=1).installed(20).pause(22, for_s=2).uninstalled(30)
    first.write(run_dir)
    second.write(run_dir)
    history = read_history(run_dir.root)
    assert [(attempt.pid, len(attempt.pauses), attempt.ended) for attempt in history.attempts] == [
        (10, 2, False),
        (11, 1, True),
    ]
    assert history.restarts == 1
    assert history.observed_s == pytest.approx(30)
    assert [history.begin_s(attempt) for attempt in history.attempts] == pytest.approx([0, 20])


def test_interleaved_attempts() -> None:
    """Lines of a dying process between those of the new one change nothing."""
    old = RankLog(pid=10).installed().pause(1).pause(3)
    new = RankLog(pid=10, restart_count=1).installed(5).pause(6).pause(8)
    mixed = [event for pair in zip(old.events, new.events, strict=True) for event in pair]
    assert attempts_of(mixed) == attempts_of([*old.events, *new.events])


def test_installed_twice_in_one_process() -> None:
    """A script that was started pausable, then by its Run, then by itself again: one attempt, whose
    pauses are counted through. A second Run of the process begins another."""
    unasked = RankLog().installed().pause(1).uninstalled(3)
    run = RankLog().trains(4, attempt=1).pause(8, cause="user")
    run.add(EventKind.ATTEMPT_ENDED, 10, attempt=1, ending="finished").uninstalled(10.1)
    behind = RankLog().installed(10.2).pause(11, cause="api").uninstalled(13)
    events = [event for log in (unasked, run, behind) for event in log.events]
    (attempt,) = attempts_of(events)
    assert [(pause.number, pause.causes) for pause in attempt.pauses] == [
        (1, ("slurm",)),
        (2, ("user",)),
        (3, ("api",)),
    ]
    assert attempt.ended
    assert attempt.progress.has_run
    assert (attempt.progress.attempt, attempt.progress.ending) == (1, "finished")
    assert (attempt.last_mono_ns - attempt.first_mono_ns) / 1e9 == pytest.approx(13)
    second = RankLog().trains(14, attempt=2).uninstalled(20)
    assert [attempt.progress.attempt for attempt in attempts_of([*events, *second.events])] == [
        1,
        2,
    ]


def test_ranks_are_lined_up_by_wall_clock(run_dir: RunDir) -> None:
    """Ranks on machines that were booted at different times lie at the same place."""
    for rank in range(2):
        log = RankLog(rank=rank, host=f"n{rank}", boot_s=1e5 * (rank + 1))
        log.installed().pause(4).uninstalled(9).write(run_dir)
    history = read_history(run_dir.root)
    stamps = [(attempt, attempt.pauses[0].requested_mono_ns) for attempt in history.attempts]
    at_s = [history.since_begin_s(attempt, stamp) for attempt, stamp in stamps if stamp is not None]
    assert at_s == pytest.approx([4, 4])


@pytest.mark.parametrize("value", [-5.0, float("nan"), float("inf"), "80", True, None])
def test_impossible_latency(value: Any) -> None:
    """A latency that cannot be is not believed; the stamps are used instead."""
    log = RankLog().installed().pause(1)
    parked = next(event for event in log.events if event.kind is EventKind.PARKED)
    log.events[log.events.index(parked)] = dataclasses.replace(
        parked, data={**parked.data, "park_us": value}
    )
    assert only_pause(log).park_us == pytest.approx(80, abs=0.01)


@pytest.mark.parametrize("seen", ["missing", "empty", "other", "file"])
def test_not_a_run_folder(tmp_path: Path, seen: str) -> None:
    """What is no run folder is refused, with what was found and what was looked for."""
    folder = tmp_path / "folder"
    if seen == "file":
        folder.write_text("")
    elif seen != "missing":
        folder.mkdir()
        if seen == "other":
            (folder / "notes.txt").write_text("")
    found = {"missing": "no such folder", "empty": "empty", "other": "notes.txt", "file": "a file"}
    with pytest.raises(RunFolderError, match=found[seen]) as caught:
        read_history(folder)
    assert "events/rank-00000.jsonl" in str(caught.value)
    assert "submission.json" in str(caught.value)


def test_job_that_has_not_started(tmp_path: Path) -> None:
    """A folder with a submission and no events is a run without attempts."""
    (tmp_path / "submission.json").write_text("{}")
    assert read_history(tmp_path) == History(name=tmp_path.name)


def full_log() -> list[Event]:
    """Two ranks, two attempts each, all causes: what hypothesis takes lines away from."""
    events: list[Event] = []
    for rank in range(2):
        for restart in range(2):
            log = RankLog(rank=rank, pid=50 + restart, restart_count=restart)
            log.installed(50 * restart)
            for number, cause in enumerate(("slurm", "user", "api", "terminal")):
                log.pause(50 * restart + 5 * number + 1, cause=cause, held=number != 2)
            log.add(EventKind.STOP_REQUESTED, 50 * restart + 30, signal="SIGTERM")
            events += log.uninstalled(50 * restart + 31).events
    return events


FULL = full_log()


@given(
    kept=st.lists(st.sampled_from(range(len(FULL))), unique=True, max_size=len(FULL)),
    ordered=st.booleans(),
)
def test_any_lines_may_be_lost(kept: list[int], ordered: bool) -> None:
    """Whatever lines are left, in whatever order, the pauses make sense and become figures."""
    events = [FULL[index] for index in (sorted(kept) if ordered else kept)]
    history = History(name="x", attempts=attempts_of(events))
    for pause in history.pauses:
        assert pause.complete == (pause.outcome == "complete")
        for value in (pause.park_us, pause.parked_s, pause.resume_us):
            assert value is None or value >= 0
    figures = figures_of(history)
    assert figures.pauses == len(history.pauses) == len(figures.every_pause)
    assert (
        json.loads(json.dumps(figures.as_dict(), allow_nan=False))["incomplete"] <= figures.pauses
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
fields = ("pause", "causes", "requested_mono_ns", "park_us", "held", "operator", "signal")


@settings(max_examples=200)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(list(EventKind)),
            st.integers(-(2**62), 2**62),
            st.dictionaries(st.sampled_from(fields), json_values) | json_values,
            json_values,
        ),
        max_size=12,
    )
)
def test_any_fields(rows: list[tuple[EventKind, int, Any, Any]]) -> None:
    """Fields of any type and value never raise, and what comes out can be written as JSON."""
    events = [
        Event(kind=kind, mono_ns=mono_ns, epoch_ns=mono_ns // 2, step=step, data=data)
        for kind, mono_ns, data, step in rows
    ]
    json.dumps(
        figures_of(History(name="x", attempts=attempts_of(as_read(events)))).as_dict(),
        allow_nan=False,
    )


@given(noise=st.lists(st.binary(max_size=30), max_size=5), cut=st.integers(0, 400))
def test_any_bytes_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, noise: list[bytes], cut: int
) -> None:
    """Bytes of any kind before the log, and a log cut off anywhere, can be read."""
    run_dir = RunDir(tmp_path_factory.mktemp("run"))
    path = RankLog().installed().pause(1).pause(3).write(run_dir)
    path.write_bytes(b"\n".join([*noise, path.read_bytes()])[: -cut or None])
    assert len(read_history(run_dir.root).pauses) <= 2
