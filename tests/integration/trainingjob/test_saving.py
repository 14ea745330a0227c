"""A TrainingJob whose script has a Run is preempted and loses nothing. On a real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from integration.trainingjob.scene import HERE, Scene

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.jobs.supervisor.attempts import Ending
from hydroslurm.report.reading import read_history

pytestmark = pytest.mark.slurm


@pytest.mark.scene("saved")
def test_a_preempted_run_goes_on_where_it_was(scene: Scene, tmp_path: Path) -> None:
    """Preempted once, it ends with the weights of a run left alone; a requeue is no failure."""
    assert scene.final_condition().type == "Succeeded"
    assert [one.ending for one in scene.attempts] == [Ending.PREEMPTED, Ending.SUCCEEDED]
    (tmp_path / "hurry").touch()
    alone = subprocess.run(
        [sys.executable, HERE.parents[1] / "jobs/launch/submitted.py", tmp_path],
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert json.loads(scene.printed(0).splitlines()[-1]) == json.loads(alone.stdout)
    # pausable from the start, then by its Run: one attempt of a report each
    attempts = read_history(scene.run.root).attempts
    assert [one.restart_count for one in attempts] == [0, 1]
    assert all(one.progress is not None for one in attempts)


@pytest.mark.scene("asked")
def test_a_stop_that_a_person_asked_for_is_no_failure(scene: Scene) -> None:
    """Slurm has no reason for a signal of `scancel --signal`, and the ranks' events do: it is
    requeued within a backoffLimit of 0, and described as asked for, not as requeued by hand."""
    assert scene.final_condition().type == "Succeeded"
    assert [one.ending for one in scene.attempts] == [Ending.PREEMPTED, Ending.SUCCEEDED]
    assert [one.restart_count for one in scene.attempts] == [0, 1]
    (told,) = [one for one in scene.conditions if one.type == "Preempted"]
    assert told.reason == "Asked"
    # the next attempt's supervisor writes it down where the job's end was faster than this one's
    assert "SIGTERM received: Slurm names no cause" in told.message


@pytest.mark.scene("saved")
def test_the_spec_decides_where_and_how_often_it_saves(scene: Scene) -> None:
    """checkpointDirectory and saveEverySeconds count above what the script says, which is never."""
    events = list(read_events(scene.run.rank_events(0)))
    first_attempt = [event for event in events if event.restart_count == 0]
    stopped = next(n for n, one in enumerate(first_attempt) if one.kind is EventKind.STOP_REQUESTED)
    saves = [one for one in first_attempt[:stopped] if one.kind is EventKind.SAVE_COMMITTED]
    assert len(saves) >= 2
    kept = scene.folder / "kept here"
    assert list(kept.glob("step-*"))
    listed = scene.hydroslurm("checkpoint", "ls", str(scene.run.root))
    assert all(str(int(path.stem[5:])) in listed.stdout for path in kept.glob("step-*"))
