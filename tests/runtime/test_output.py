"""Output that breaks while a run stops does not keep it from being saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Child, child

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.rundir import RunDir

PROGRAM = Path(__file__).with_name("broken_output.py")


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    path = os.pathsep.join([str(PROGRAM.parents[1]), os.environ["PYTHONPATH"]])
    environ = {"PYTHONUNBUFFERED": "", "PYTHONPATH": path}
    with child(PROGRAM.read_text(), tmp_path_factory.mktemp("forker"), environ=environ) as forker:
        forker.expect("ready")
        yield forker


@pytest.mark.parametrize(
    ("breaks", "by"),
    [
        *(("pipe", by) for by in ("print", "tqdm", "logging", "bytes", "worker")),
        *(("disk", by) for by in ("flushed", "tqdm")),
        ("early", "flushed"),
        ("sigpipe", "flushed"),
        ("tee", "print"),
    ],
)
def test_a_stop_is_saved_whatever_becomes_of_the_output(
    forker: Child, tmp_path: Path, breaks: str, by: str
) -> None:
    """The run reaches its safe point, commits, leaves with its own status, and an event tells."""
    forker.say(f"{tmp_path}\t{breaks}\t{by}")
    run = RunDir(tmp_path)
    assert int(forker.expect("ended")) == RUN_AGAIN
    events = {event.kind: event for event in read_events(run.rank_events(0))}
    assert events[EventKind.SAVE_COMMITTED].data["checkpoint_step"] >= 3
    assert events[EventKind.OUTPUT_LOST].data["stream"] in ("stdout", "stderr")


def test_without_a_stop_a_broken_pipe_is_the_scripts(forker: Child, tmp_path: Path) -> None:
    """BrokenPipeError is raised as ever, and ends the run as an error."""
    forker.say(f"{tmp_path}\tno stop\tflushed")
    assert int(forker.expect("ended")) not in (0, RUN_AGAIN)
    kinds = [event.kind for event in read_events(RunDir(tmp_path).rank_events(0))]
    assert EventKind.ATTEMPT_ENDED in kinds
    assert EventKind.OUTPUT_LOST not in kinds
