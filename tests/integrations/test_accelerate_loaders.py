"""Loops with accelerate: what is not kept, or was not given to prepare()."""

from __future__ import annotations

from pathlib import Path

import pytest
from integrations.proofs import ACCELERATE, Row, play, printed, proved

OTHERWISE = "To do without: prepare(accelerator, ..., check=False)"
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
NOT_GIVEN = {
    "module": (
        "AdamW (of parameters of shape [4, 2], [4] and 4 more) trains 6 parameters that are not",
        "Give the module that has them to prepare(accelerator, ..., module)",
    ),
    "optimizer": ("AdamW (of parameters of", "Give it to prepare(accelerator, ..., optimizer)."),
    "scheduler": (
        "a scheduler sets the learning rate of AdamW (of parameters of shape",
        "Give it to prepare(accelerator, ..., scheduler).",
    ),
    "scaler": (
        "a GradScaler (scale 1024) has scaled this step and is not part of this run",
        "accelerator.register_for_checkpointing(scaler) before prepare().",
    ),
    "loader": (
        "a batch was taken from an iterator over a DataLoader, which has no position",
        "Give the loader to prepare(accelerator, ..., loader), and iterate what that returns.",
    ),
}


@pytest.mark.parametrize("scene", [*NOT_KEPT, *NOT_GIVEN])
def test_what_cannot_be_kept(scene: str, tmp_path: Path) -> None:
    """It ends the run in its first steps, with what to write."""
    play(Row(f"accelerate_loaders.py {scene}", ACCELERATE, ""), tmp_path)
    said = printed(tmp_path / "whole" / "out-0")[-1]
    if scene in NOT_KEPT:
        assert said == f"= {NOT_KEPT[scene]}. {OTHERWISE}"
        return
    seen, remedy = NOT_GIVEN[scene]
    assert said.startswith(f"= {seen}")
    assert remedy in said
    assert said.endswith("prepare(accelerator, ..., check=False)")


def test_nobody_looks(tmp_path: Path) -> None:
    """With check=False the loop is as the script has it."""
    play(Row("accelerate_loaders.py optimizer; unchecked", ACCELERATE, ""), tmp_path)
    assert printed(tmp_path / "whole" / "out-0")[-1].startswith("= 40 ")


def test_a_part_of_an_epoch_that_is_repeated(tmp_path: Path) -> None:
    """It is said."""
    scene = "accelerate_loaders.py one behind the other; accumulated"
    said = proved(Row(scene, ACCELERATE, "step:3 step:4 step:2", trainings=2), tmp_path)
    assert "loader 2 of those that prepare() was given is trained from behind the batches" in said
