"""Lightning's fit at the edges: other versions, other models, runs that are trained longer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import zygote
from integrations.proofs import LIGHTNING

SCRIPT = Path(__file__).with_name("lightning_edges.py")
Found: TypeAlias = dict[str, list[list[Any]]]

pytestmark = pytest.mark.long


def play(folder: Path, *edges: str) -> Found:
    """Name -> exit statuses and notes of all attempts."""
    ran = zygote.ran([SCRIPT, folder, *edges], loads=LIGHTNING)
    assert ran.returncode == 0, ran.stderr
    return {**json.loads(ran.stdout.splitlines()[-1]), "said": ran.stderr}


def test_what_does_not_fit(tmp_path: Path) -> None:
    """A Lightning that is not known: one line that names what is missing, nothing half installed,
    and it trains when it is there. A checkpoint of another model is refused with the step."""
    found = play(tmp_path, "another lightning", "another model")
    exits, notes = found["another lightning"]
    said = "trainer.fit_loop.epoch_loop.advance; hydroslurm knows 2.4 to 2.6"
    assert exits == [0], found["said"]
    assert [notes[0].startswith("asked: "), said in notes[0]] == [True, True]
    assert [notes[2].startswith("unasked: "), said in notes[2]] == [True, True]
    assert [notes[1], notes[3]] == ["as it was: True"] * 2
    assert notes[4] == "trained 11"
    exits, notes = found["another model"]
    assert exits == [75, 0], found["said"]
    assert "refused: step 4 of this run does not fit the model (Module), or its" in notes[-1]
    assert "size mismatch" in notes[-1]


def test_a_run_that_had_come_to_its_end_is_trained_longer(tmp_path: Path) -> None:
    """By epochs it is the run that was to be as long from the beginning. With max_steps in the
    middle of an epoch, where Lightning validates, the rest of that epoch comes first."""
    by_epochs, by_steps = ("more epochs", "more epochs, no length"), "more steps"
    found = play(tmp_path, *by_epochs, by_steps)
    for name in (*by_epochs, by_steps):
        assert found[name][0] == [75, 0], found["said"]
    for name in by_epochs:
        (_, longer), (_, whole) = found[name], found[f"{name}, undisturbed"]
        assert [one for one in longer if one[:7] != "weights"] == whole[:-1]
        assert longer[-1] == whole[-1]
    longer, whole = (
        [one.split()[:3] for one in notes if one[:4] == "step"]
        for _, notes in (found[by_steps], found[f"{by_steps}, undisturbed"])
    )
    assert longer == whole
