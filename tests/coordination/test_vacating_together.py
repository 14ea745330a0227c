"""Several ranks with a device each, a model of CUDA's: one pause vacates all of them or none."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from coordination.attempts import Story
from processes import wait_until

from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import RUN_AGAIN

WORLD = 3
MODEL = Path(__file__).parent.parent / "vacate" / "model.py"


def _wait_for(story: Story, kind: EventKind, number: int) -> None:
    wait_until(
        lambda: all(len(story.events(rank, kind)) == number for rank in range(WORLD)),
        f"{kind.value} {number} of all ranks",
    )


def _calls(folder: Path) -> list[str]:
    lines = (folder / "calls").read_text().splitlines()
    return [line.split()[0] for line in lines if not line.startswith("state")]


def test_one_signal_vacates_all(story: Story, tmp_path: Path) -> None:
    """SIGUSR1 to one rank: all are locked before one is checkpointed, and all restored before one
    is unlocked; they train on, and a later pause in which one cannot be locked moves nobody."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "faults.json").write_text("[]")
    attempt = story.begin_training(
        WORLD, vacate=[str(MODEL), str(folder)], environ={"HYDROSLURM_VACATE": "always"}
    )
    attempt.signal(1, signal.SIGUSR1)
    _wait_for(story, EventKind.VACATED, 1)
    assert _calls(folder) == ["lock"] * WORLD + ["checkpoint"] * WORLD
    attempt.signal(1, signal.SIGUSR2)
    _wait_for(story, EventKind.RESTORED, 1)
    story.wait_for_more(3)
    assert _calls(folder)[2 * WORLD :] == ["restore"] * WORLD + ["unlock"] * WORLD

    (folder / "calls").unlink()
    (folder / "faults.json").write_text(json.dumps([["lock", 2, "refuse"]]))
    attempt.signal(2, signal.SIGUSR1)
    _wait_for(story, EventKind.NOT_VACATED, 1)
    assert "checkpoint" not in _calls(folder)
    told = {story.events(rank, EventKind.NOT_VACATED)[0].data["reason"] for rank in range(WORLD)}
    assert len(told) == 1
    assert "CUDA_ERROR_UNKNOWN" in told.pop()
    attempt.signal(2, signal.SIGUSR2)
    story.wait_for_more(3)

    (folder / "faults.json").write_text("[]")
    attempt.signal(0, signal.SIGUSR1)
    _wait_for(story, EventKind.VACATED, 2)
    attempt.signal(0)  # a stop, while all are away
    assert set(attempt.end().codes.values()) == {RUN_AGAIN}, attempt.said
    assert _calls(folder)[-2 * WORLD :] == ["restore"] * WORLD + ["unlock"] * WORLD
