"""Loops with accelerate over several loaders: each has a position of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCENES = Path(__file__).with_name("accelerate_loaders.py")
OTHERWISE = ". To do without: prepare(accelerator, ..., check=False)"
FEW = (
    "zip, the other first", "now and then; accumulated, seeded",
    "one behind the other; accumulated",
)  # fmt: skip
MANY = (
    "zip", "zip; accumulated", "now and then; workers", "now and then; accumulated, workers",
    "one in the other; accumulated", "one in the other; seeded", "chain; accumulated",
    "chain; seeded", "epoch by epoch; seeded", "epoch by epoch; accumulated, workers",
    "zip, the other first; 2 ranks", "chain; 2 ranks", "epoch by epoch; seeded, 2 ranks",
)  # fmt: skip
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


def played(folder: Path, *scenes: str) -> dict[str, list[Any]]:
    """Scene -> exit statuses of the stopped attempts, their notes, those of a run that nobody has
    stopped, and what was said."""
    ran = subprocess.run(
        [sys.executable, SCENES, folder, *scenes], capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[Any]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return played(tmp_path_factory.mktemp("loaders"), *FEW, *NOT_KEPT)


def require_equal(scene: str, found: dict[str, list[Any]]) -> None:
    exits, notes, whole, said = found[scene]
    assert (scene, [*dict.fromkeys(exits)]) == (scene, [75, 0]), said
    assert (scene, notes) == (scene, whole)
    assert len(whole) > 9


@pytest.mark.parametrize("scene", FEW)
def test_each_has_a_position(scene: str, found: dict[str, list[Any]]) -> None:
    """Batches, losses, and what a shuffled evaluation that is left early shows, are those of a run
    that nobody has stopped."""
    require_equal(scene, found)


@pytest.mark.long
def test_each_has_a_position_in_other_loops(tmp_path: Path) -> None:
    """With workers, accumulation, and samplers that accelerate seeds."""
    found = played(tmp_path, *MANY)
    for scene in MANY:
        require_equal(scene, found)


@pytest.mark.parametrize("scene", NOT_KEPT)
def test_what_cannot_be_kept(scene: str, found: dict[str, list[Any]]) -> None:
    """It ends the run in its first steps, with what to write."""
    assert found[scene][2][-1] == NOT_KEPT[scene] + OTHERWISE


def test_a_part_of_an_epoch_that_is_repeated(found: dict[str, list[Any]]) -> None:
    """It is said."""
    said = found["one behind the other; accumulated"][3]
    assert "loader 2 of those that prepare() was given is trained from behind the batches" in said
