"""Lightning's fit, stopped at all kinds of places: the attempts together are an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCENES = Path(__file__).with_name("lightning_scenes.py")
STOPPED = 75
LONG = pytest.mark.long
BOTH = """
import pickle, sys
import lightning.pytorch, pytorch_lightning, torch
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from hydroslurm.integrations.lightning import Preemptible

rows = DataLoader(TensorDataset(torch.ones(8, 2)), 2)
for package in (lightning.pytorch, pytorch_lightning):
    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.base = torch.nn.Linear(2, 10000).requires_grad_(False)
            self.net = torch.nn.Linear(10000, 1)
        def training_step(self, batch):
            return self.net(self.base(batch[0])).sum()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    folder = Path(sys.argv[1], package.__name__)
    own = pickle.loads(pickle.dumps(Preemptible(directory=folder, every_steps=1)))
    trainer = package.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, callbacks=[own],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )
    trainer.fit(Module(), rows)
    print(isinstance(own, package.Callback), trainer.global_step)
"""


def play(scene: str, folder: Path, *stops: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, SCENES, scene, folder / "runs", *stops],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return {**json.loads(ran.stdout), "said": ran.stderr}


@pytest.mark.parametrize(
    ("scene", "stops"),
    [
        # in the sanity check, in validation, at the ends of epochs
        ("plain", "sanity train:0 train:10 val:1 epoch:0 val:0 epoch:2"),
        pytest.param("accumulate", "train:3 train:5 val:1 train:32", marks=LONG),
        ("stream", "train:2 train:10 val:1 train:32"),
        ("averaged", "train:3 val:0 train:20"),
        ("thaw", "train:3 train:14 val:1 train:28"),
        pytest.param("workers", "train:4 val:1 train:32", marks=LONG),
        pytest.param("max_steps", "train:5 train:10 train:21", marks=LONG),
        pytest.param("manual", "train:2 train:10 train:21", marks=LONG),
        pytest.param("several", "train:3 train:10 train:25", marks=LONG),
        pytest.param("scaled", "train:1 train:5 train:12 train:30", marks=LONG),
        pytest.param("swa", "train:3 train:11 train:30", marks=LONG),
        pytest.param("callbacks", "train:5 train:10 val:2", marks=LONG),
        *(
            pytest.param(*one, marks=LONG)
            for one in (
                ("fractions", "train:1 train:2 val:4 train:10 train:22"),
                ("half", "sanity train:0 train:4 val:0 train:9"),
                ("overfit", "train:1 train:2 val:0 train:5"),
                ("max_time", "train:3 train:10 train:30"),
                ("reload", "train:3 train:10 epoch:1"),
                ("patience", "train:0 train:1 train:2 train:3 val:3 train:7"),
            )
        ),
    ],
)
def test_stopped_run_is_the_undisturbed_one(scene: str, stops: str, tmp_path: Path) -> None:
    found = play(scene, tmp_path, *stops.split())
    assert found["undisturbed_exits"] == [0]
    assert found["stopped_exits"] == [*[STOPPED] * len(stops.split()), 0]
    assert found["stopped"] == found["undisturbed"]
    assert len(found["stopped"]) > 9


def test_a_script_that_imports_both_packages(tmp_path: Path) -> None:
    """As one does whose libraries have not moved on: either Trainer takes the callback."""
    ran = subprocess.run(
        [sys.executable, "-c", BOTH, tmp_path], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["True 4"] * 2
    for package in ("lightning.pytorch", "pytorch_lightning"):
        assert (tmp_path / package / "finished.json").exists()
        # what is not trained is apart
        files = list(tmp_path.glob(f"{package}/checkpoints/*/frozen-00000.safetensors"))
        assert len(files) == 2
        assert all(80_000 < file.stat().st_size < 82_000 for file in files)
