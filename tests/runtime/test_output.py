"""Output that breaks while a run stops does not keep it from being saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import zygote

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.rundir import RunDir

PROGRAM = Path(__file__).with_name("broken_output.py")


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
    tmp_path: Path, breaks: str, by: str
) -> None:
    """The run reaches its safe point, commits, leaves with its own status, and an event tells."""
    run = RunDir(tmp_path)
    assert zygote.ran([PROGRAM, tmp_path, breaks, by]).returncode == RUN_AGAIN
    events = {event.kind: event for event in read_events(run.rank_events(0))}
    assert events[EventKind.SAVE_COMMITTED].data["checkpoint_step"] >= 3
    assert events[EventKind.OUTPUT_LOST].data["stream"] in ("stdout", "stderr")


def test_without_a_stop_a_broken_pipe_is_the_scripts(tmp_path: Path) -> None:
    """BrokenPipeError is raised as ever, and ends the run as an error."""
    ended = zygote.ran([PROGRAM, tmp_path, "no stop", "flushed"]).returncode
    assert ended not in (0, RUN_AGAIN)
    kinds = [event.kind for event in read_events(RunDir(tmp_path).rank_events(0))]
    assert EventKind.ATTEMPT_ENDED in kinds
    assert EventKind.OUTPUT_LOST not in kinds
