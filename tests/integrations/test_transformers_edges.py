"""Hugging Face's Trainer at the edges: other versions, other models, finished runs, runs that are
trained longer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import zygote
from integrations.proofs import TRANSFORMERS

EDGES = Path(__file__).with_name("transformers_edges.py")
ADAPTER = """
import sys, torch
from transformers import Trainer, TrainingArguments
from hydroslurm.integrations.transformers import make_preemptible

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(2, 10000).requires_grad_(False)
        self.net = torch.nn.Linear(10000, 1)
    def forward(self, x, labels=None):
        return {"loss": (self.net(self.base(x)) - labels).square().mean()}

rows = [{"x": torch.ones(2), "labels": torch.zeros(1)} for _ in range(8)]
arguments = TrainingArguments(
    "out", max_steps=4, per_device_train_batch_size=2, report_to=[], save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(model=Model(), args=arguments, train_dataset=rows)
make_preemptible(trainer, directory="run", every_steps=1).train()
"""
Found: TypeAlias = dict[str, list[list[Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Name -> exit statuses and notes of all attempts."""
    ran = zygote.ran([EDGES, tmp_path_factory.mktemp("edges")], loads=TRANSFORMERS)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_a_transformers_that_is_not_known(found: Found) -> None:
    """One line that names what is missing, nothing half installed; and it trains when it is."""
    exits, notes = found["another transformers"]
    said = "transformers.trainer.skip_first_batches; hydroslurm knows 4.57 to 5"
    assert exits == [0]
    assert [said in notes[0], notes[1]] == [True, "as it was: True"]
    assert [notes[2].startswith("unasked: "), said in notes[2]] == [True, True]
    assert notes[3:] == ["as it was: True", "trained 12"]


def test_a_checkpoint_of_another_model(found: Found) -> None:
    """It is refused, with the step, the kind of model and the first shapes that differ."""
    exits, notes = found["another model"]
    assert exits == [75, 0]
    assert "refused: step 3 of this run does not fit the model (GPT2LMHeadModel)" in notes[-1]
    assert "size mismatch" in notes[-1]


def test_a_finished_run(found: Found) -> None:
    """Its restart exits with 0 and trains nothing."""
    assert found["finished"][0] == found["finished again"][0] == [0]
    assert found["finished again"][1] == found["finished"][1]


def test_it_goes_on_from_a_checkpoint_as_transformers_does(found: Found) -> None:
    """Within the second epoch, whose order is another one: the same steps as without us."""
    assert found["own checkpoint, bare"] == found["own checkpoint"]


@pytest.mark.parametrize("by", ["num_train_epochs", "max_steps"])
def test_a_run_that_had_come_to_its_end_is_trained_longer(found: Found, by: str) -> None:
    """It is the run that was to be as long from the beginning."""
    (exits, longer), (_, whole) = found[f"{by}, longer"], found[f"{by}, whole"]
    assert exits == [75, 0]
    steps = [one for one in longer if one[0].isdigit()]
    assert steps == [one for one in whole if one[0].isdigit()]
    assert longer[-1] == whole[-1]


def test_what_is_not_trained_is_apart(tmp_path: Path) -> None:
    """In files that later checkpoints share."""
    (tmp_path / "adapter.py").write_text(ADAPTER)
    ran = zygote.ran([tmp_path / "adapter.py"], loads=TRANSFORMERS)
    assert ran.returncode == 0, ran.stderr
    files = list(tmp_path.glob("run/checkpoints/*/frozen-00000.safetensors"))
    assert len(files) == 2
    assert all(80_000 < file.stat().st_size < 82_000 for file in files)
