"""Loops with accelerate over several loaders: what has no position that could be kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from integrations.proofs import ACCELERATE, Row, play, printed, proved

OTHERWISE = ". To do without: prepare(accelerator, ..., check=False)"
NOT_KEPT = {
    "cycle": (
        "itertools.cycle() keeps the batches of loader 2 of those that prepare() was given, and "
        "hands them out again: a resumed run would have those that were left when it was stopped. "
        "Write `def endless(loader): while True: yield from loader`, and iterate endless(loader)"
    ),
    "twice": (
        "loader 1 of those that prepare() was given is iterated twice at a time, and it has one "
        "position: give prepare() a loader for each"
    ),
    "fetched before": (
        "a batch of loader 2 of those that prepare() was given was fetched before the first step, "
        "or while all models were in evaluation mode, and one is trained on now from the same "
        "iterator: a resumed run would fetch that first one again. Fetch it in the step that uses "
        "it, within epochs(), behind model.train()"
    ),
}


@pytest.mark.parametrize("scene", NOT_KEPT)
def test_what_cannot_be_kept(scene: str, tmp_path: Path) -> None:
    """It ends the run in its first steps, with what to write."""
    play(Row(f"accelerate_loaders.py {scene}", ACCELERATE, ""), tmp_path)
    assert printed(tmp_path / "whole" / "out-0")[-1] == "= " + NOT_KEPT[scene] + OTHERWISE


def test_a_part_of_an_epoch_that_is_repeated(tmp_path: Path) -> None:
    """It is said."""
    scene = "accelerate_loaders.py one behind the other; accumulated"
    said = proved(Row(scene, ACCELERATE, "step:3 step:4 step:2", trainings=2), tmp_path)
    assert "loader 2 of those that prepare() was given is trained from behind the batches" in said
