"""HFAI's example on two ranks, and its callback wherever a stop may come."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import zygote
from integrations.proofs import LIGHTNING

Scene = tuple[list[int], list[str]]
"""How its attempts ended, and what they have noted."""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scene]:
    """Each a training with its stops; torch and Lightning are loaded once."""
    scenes = Path(__file__).with_name("hfai_scenes.py")
    done = zygote.ran([scenes, tmp_path_factory.mktemp("scenes")], loads=LIGHTNING)
    assert done.returncode == 0, done.stderr
    found: dict[str, Scene] = json.loads(done.stdout.splitlines()[-1])
    return found


def without(notes: list[str], *left_out: str) -> list[str]:
    """What was noted, but for the first of each of these, and the files that were gone on from."""
    kept = [line for line in notes if not line.startswith("file ")]
    for line in left_out:
        kept.remove(line)
    return kept


@pytest.mark.parametrize("name", ["end_of_epoch", "before_a_validation"])
def test_a_stop_before_a_validation(scenes: dict[str, Scene], name: str) -> None:
    """It is done once, by the next attempt, and the module's own hook has been called."""
    exits, notes = scenes[name]
    whole = scenes["undisturbed" if name == "end_of_epoch" else "undisturbed_often"][1]
    assert exits == [75, 0]
    assert without(notes) == whole


@pytest.mark.parametrize(
    ("name", "step"), [("in_validation", 6), ("in_the_last_validation", 12), ("in_a_validation", 3)]
)
def test_a_stop_within_a_validation(scenes: dict[str, Scene], name: str, step: int) -> None:
    """It is obeyed there, and the next attempt begins the validation anew."""
    exits, notes = scenes[name]
    whole = scenes["undisturbed_often" if name == "in_a_validation" else "undisturbed"][1]
    assert set(exits[:-1]) == {75}
    assert exits[-1] == 0
    begun = (f"validation 0 at {step}", f"validation 1 at {step}")
    assert without(notes, *begun) == whole


def test_killed_in_the_middle_of_the_save(scenes: dict[str, Scene]) -> None:
    """The file of the stop before stays as it was, the training goes on from it, and what was
    written of the new one is gone in the end."""
    exits, notes = scenes["killed_in_the_save"]
    assert exits == [75, -signal.SIGKILL, 0]
    files = [line for line in notes if line.startswith("file ")]
    assert len(files) == 2
    assert files[0] == files[1]
    again = ("step 2 of epoch 0", "trained 3", "step 3 of epoch 0", "trained 4")
    assert without(notes, *again) == scenes["undisturbed"][1]
