"""What a loop with accelerate uses and its run does not save: found at the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import zygote
from integrations.proofs import ACCELERATE

SCENES = Path(__file__).with_name("accelerate_mistakes.py")
OTHERWISE = " If what you register saves it in another form: prepare(accelerator, ..., check=False)"
Found: TypeAlias = dict[str, list[list[Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Name -> exit statuses and notes of all attempts."""
    ran = zygote.ran([SCENES, tmp_path_factory.mktemp("mistakes")], loads=ACCELERATE)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("forgotten", "seen", "remedy"),
    [
        (
            "critic",
            "SGD (of parameters of shape [1, 2], [1]) trains 2 parameters that are not part of",
            "Give the module that has them to prepare(accelerator, ..., module); "
            "torch.nn.ParameterList([tensor]) for a tensor that belongs to none.",
        ),
        (
            "critic_optimizer",
            "SGD (of parameters of shape [1, 2], [1]) has stepped and is not part of this run",
            "Give it to prepare(accelerator, ..., optimizer).",
        ),
        (
            "scheduler",
            "a scheduler sets the learning rate of AdamW (of parameters of shape [1, 2], [1])",
            "Give it to prepare(accelerator, ..., scheduler).",
        ),
        (
            "later_scheduler",
            "a scheduler sets the learning rate of AdamW (of parameters of shape [1, 2], [1])",
            "Give it to prepare(accelerator, ..., scheduler).",
        ),
        (
            "scaler",
            "a GradScaler (scale 1024) has scaled this step and is not part of this run",
            'Accelerator(mixed_precision="fp16") has one that is saved; for one of your own: '
            "accelerator.register_for_checkpointing(scaler) before prepare().",
        ),
    ],
)
def test_what_was_forgotten(forgotten: str, seen: str, remedy: str, found: Found) -> None:
    """It is said at the first step, with what to write; nothing was saved."""
    exits, (_, said, *saved) = found[forgotten]
    assert (exits, saved) == ([0], [""])
    assert said.startswith(seen)
    assert said.endswith(remedy + OTHERWISE)


def test_a_second_loader(found: Found) -> None:
    """One that is not given to prepare() has no position."""
    assert found["more"][1][1:] == [
        "a batch was taken from an iterator over a DataLoader, which has no position that is "
        "saved: resumed, it would begin with its first batches again. Give the loader to "
        "prepare(accelerator, ..., loader), and iterate what that returns. If the script skips "
        "what was read already: prepare(accelerator, ..., check=False)",
        "",
    ]


def test_nothing_was_forgotten(found: Found) -> None:
    """It trains to its end, and resumed with the same bits: those of the generator, too."""
    exits, notes = found["nothing"]
    assert (exits, len(notes)) == ([0], 4)
    assert found["nothing and stopped"] == [[75, 75, 0], notes]


@pytest.mark.parametrize("thing", ["ema", "noise"])
def test_what_comes_back_by_itself(thing: str, found: Found) -> None:
    """An average of the weights and a generator that nobody gave, in variables of the loop."""
    assert found[f"{thing} and stopped"] == [[75, 75, 0], found["nothing"][1]]


def test_nobody_looks(found: Found) -> None:
    """With check=False the loop is as the script has it."""
    assert found["ema, unchecked"] == found["nothing"]
