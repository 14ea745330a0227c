"""Events -> attempts and pauses: complete, torn, several attempts in one file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from report.ranklog import RankLog
from report.views import tells

from hydroslurm.core.events import EventKind
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError
from hydroslurm.report.attempts import attempts_of
from hydroslurm.report.history import History
from hydroslurm.report.pauses import Pause
from hydroslurm.report.reading import read_history


def pauses_of(log: RankLog) -> tuple[Pause, ...]:
    (attempt,) = attempts_of(log.events)
    return attempt.pauses


def closed(*causes: str) -> RankLog:
    """The gate is closed after a second; more is to come."""
    log = RankLog().installed()
    begin = {"pause": 1, "requested_mono_ns": log.mono_ns(1)}
    return log.add(EventKind.GATE_CLOSED, 1, causes=list(causes), **begin)


def resumed(log: RankLog, at_s: float) -> RankLog:
    end = {"pause": 1, "requested_mono_ns": log.mono_ns(at_s), "parked_s": 1.0}
    return log.add(EventKind.RESUMED, at_s, **end)


def once(**options: Any) -> RankLog:
    return RankLog().installed().pause(1, **options)


RELEASED = "first_operator_released"
PAUSES: dict[str, tuple[RankLog, dict[str, Any]]] = {
    "complete": (
        RankLog(rank=3, restart_count=2, step=17).installed().pause(4.0, for_s=2.0).uninstalled(9),
        {"complete": True, "outcome": "complete", "rank": 3, "number": 1, "restart_count": 2}
        | {"step": 17, "causes": ("slurm",), "signal": "SIGTSTP", "operator": "aten::linear"}
        | {"phase": "forward", "park_us": 80, "resume_us": 40, "parked_s": 2.0},
    ),
    "killed before it was held": (
        once(until="gate_closed"),
        {"outcome": "not parked", "missing": ("parked", "resumed")},
    ),
    "killed before it parked": (
        once(until="first_operator_held"),
        {"outcome": "not parked", "missing": ("parked", "resumed", RELEASED)},
    ),
    "killed while parked": (
        once(until="parked"),
        {"outcome": "not resumed", "missing": ("resumed", RELEASED)},
    ),
    "killed on the way back": (
        once(until="resumed"),
        {"outcome": "incomplete", "missing": (RELEASED,)},
    ),
    "no thread was held: none is released, and it is resumed with the gate": (
        once(held=False),
        {"complete": True, "operator": None, "resume_us": 9},
    ),
    "resumed before it has parked": (
        resumed(closed("user"), 2),
        {"outcome": "withdrawn", "park_us": None, "parked_s": None},
    ),
    "causes that join, in order of appearance": (
        resumed(
            closed("user")
            .add(EventKind.CAUSES_CHANGED, 2, causes=["slurm", "user"])
            .add(EventKind.CAUSES_CHANGED, 3, causes=["slurm"]),
            4,
        ).add(EventKind.CAUSES_CHANGED, 5, causes=["api"]),
        {"causes": ("user", "slurm")},
    ),
    "drained": (once().add(EventKind.DRAINED, 1.5, pause=1, drain_us=310.0), {"drain_us": 310}),
    "not drained": (
        once().add(EventKind.NOT_DRAINED, 11, pause=1, waited_s=10.0),
        {"drain_us": None, "undrained_s": 10},
    ),
}


@pytest.mark.parametrize("name", PAUSES)
def test_one_pause(name: str) -> None:
    """Every field comes from its own events; what is missing is said."""
    log, told = PAUSES[name]
    (pause,) = pauses_of(log)
    tells(pause, told)
    if name == "complete":
        stamps = [
            *(pause.requested_mono_ns, pause.closed_mono_ns, pause.held_mono_ns),
            *(pause.parked_mono_ns, pause.resume_requested_mono_ns),
            *(pause.resumed_mono_ns, pause.released_mono_ns),
        ]
        assert stamps == sorted(stamps)  # type: ignore[type-var]


@pytest.mark.parametrize("value", [-5.0, float("nan"), "80", True])
def test_impossible_latency(value: Any) -> None:
    """A latency that cannot be is not believed; the stamps are used instead."""
    log = once()
    parked = next(event for event in log.events if event.kind is EventKind.PARKED)
    damaged = dataclasses.replace(parked, data={**parked.data, "park_us": value})
    log.events[log.events.index(parked)] = damaged
    (pause,) = pauses_of(log)
    assert pause.park_us == pytest.approx(80, abs=0.01)


def test_late_release_belongs_to_its_own_pause() -> None:
    """A thread that is released after the next pause has begun counts for the first one."""
    log = once(for_s=1).pause(2.5, for_s=1)
    released = next(e for e in log.events if e.kind is EventKind.FIRST_OPERATOR_RELEASED)
    log.events.remove(released)
    log.events.append(released)
    assert [(pause.resume_us, pause.complete) for pause in pauses_of(log)] == [(40, True)] * 2


def test_signals_go_to_the_pause_they_asked_for() -> None:
    """A resume's signal, or one that came while running, is not that of the next pause."""
    log = once(for_s=1, cause="slurm").add(EventKind.SIGNAL_RECEIVED, 3, signal="SIGCONT")
    log.pause(4, for_s=1, cause="api").add(EventKind.SIGNAL_RECEIVED, 6, signal="SIGCONT")
    log.pause(7, for_s=1, cause="user")
    assert [pause.signal for pause in pauses_of(log)] == ["SIGTSTP", None, "SIGUSR1"]


def test_two_attempts_in_one_file(run_dir: RunDir) -> None:
    """After a requeue the pauses are numbered anew, and belong to another attempt of the rank."""
    RankLog(pid=10).installed().pause(1).pause(3, until="parked").write(run_dir)
    second = RankLog(pid=11, restart_count=1).installed(20).pause(22, for_s=2).uninstalled(30)
    second.write(run_dir)
    history = read_history(run_dir.root)
    attempts = [(attempt.pid, len(attempt.pauses), attempt.ended) for attempt in history.attempts]
    assert attempts == [(10, 2, False), (11, 1, True)]
    assert history.restarts == 1
    assert history.observed_s == pytest.approx(30)
    assert [history.begin_s(attempt) for attempt in history.attempts] == pytest.approx([0, 20])


def test_installed_twice_in_one_process() -> None:
    """A script that was started pausable, then by its Run, then by itself again: one attempt, whose
    pauses are counted through. A second Run of the process begins another."""
    unasked = once().uninstalled(3)
    run = RankLog().trains(4, attempt=1).pause(8, cause="user")
    run.add(EventKind.ATTEMPT_ENDED, 10, attempt=1, ending="finished").uninstalled(10.1)
    behind = RankLog().installed(10.2).pause(11, cause="api").uninstalled(13)
    events = [event for log in (unasked, run, behind) for event in log.events]
    (attempt,) = attempts_of(events)
    pauses = [(pause.number, pause.causes) for pause in attempt.pauses]
    assert pauses == [(1, ("slurm",)), (2, ("user",)), (3, ("api",))]
    assert (attempt.ended, attempt.progress.has_run) == (True, True)
    assert (attempt.progress.attempt, attempt.progress.ending) == (1, "finished")
    assert (attempt.last_mono_ns - attempt.first_mono_ns) / 1e9 == pytest.approx(13)
    second = RankLog().trains(14, attempt=2).uninstalled(20)
    both = attempts_of([*events, *second.events])
    assert [attempt.progress.attempt for attempt in both] == [1, 2]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda _: None, "no such folder"),
        (lambda folder: folder.mkdir(), "empty"),
        (lambda folder: (folder / "notes.txt").mkdir(parents=True), "notes.txt"),
        (lambda folder: folder.touch(), "a file"),
    ],
)
def test_not_a_run_folder(tmp_path: Path, make: Any, found: str) -> None:
    """What is no run folder is refused, with what was found and what was looked for."""
    make(tmp_path / "folder")
    with pytest.raises(RunFolderError, match=found) as caught:
        read_history(tmp_path / "folder")
    assert "events/rank-00000.jsonl" in str(caught.value)
    assert "submission.json" in str(caught.value)


def test_job_that_has_not_started(tmp_path: Path) -> None:
    """A folder with a submission and no events is a run without attempts."""
    (tmp_path / "submission.json").write_text("{}")
    assert read_history(tmp_path) == History(name=tmp_path.name)
