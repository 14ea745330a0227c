"""HFAI's callback wherever a stop may come."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import zygote
from integrations.proofs import LIGHTNING


def without(notes: list[str], *left_out: str) -> list[str]:
    """What was noted, but for the first of each of these, and the files that were gone on from."""
    kept = [line for line in notes if not line.startswith("file ")]
    for line in left_out:
        kept.remove(line)
    return kept


def begun(step: int) -> tuple[str, str]:
    """What is noted of a validation that is stopped in its second batch."""
    return f"validation 0 at {step}", f"validation 1 at {step}"


def test_stopped_wherever_a_stop_may_come(tmp_path: Path) -> None:
    """Before a validation it is done once, by the next attempt; within one the stop is obeyed
    there, and the next attempt begins it anew. One that is killed in the middle of its save leaves
    the file of the stop before as it was, and nothing of its own in the end."""
    scenes = Path(__file__).with_name("hfai_scenes.py")
    done = zygote.ran([scenes, tmp_path], loads=LIGHTNING)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[list[int], list[str]]] = json.loads(done.stdout.splitlines()[-1])
    whole, whole_often = found["undisturbed"][1], found["undisturbed_often"][1]

    exits, notes = found["end_of_epoch"]
    assert (exits, without(notes)) == ([75, 0], whole)
    exits, notes = found["in_validation"]
    assert (exits, without(notes, *begun(6))) == ([75, 0], whole)
    exits, notes = found["often"]
    assert exits == [75, 75, 75, 75, 0]
    assert without(notes, *begun(3), *begun(12)) == whole_often

    exits, notes = found["killed_in_the_save"]
    assert exits == [75, -signal.SIGKILL, 0]
    files = [line for line in notes if line.startswith("file ")]
    assert len(files) == 2
    assert files[0] == files[1]
    again = ("step 2 of epoch 0", "trained 3", "step 3 of epoch 0", "trained 4")
    assert without(notes, *again) == whole
