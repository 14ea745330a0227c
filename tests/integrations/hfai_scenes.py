"""Trainings with HFAI's callback, each stopped and started again as told. Prints, for each scene,
how its attempts ended and what they have noted, as JSON: ``hfai_scenes.py FOLDER``.

A stop is ``train:N`` or ``val:N``: at global step N, in the training batch or in the second batch
of the validation; ``train:N killed``: there, and killed in the middle of the save.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from attempts import attempts
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from hydroslurm.compat.hfai import ModelCheckpointHF
from hydroslurm.runtime import install

SCENES: dict[str, tuple[float | int, tuple[str, ...]]] = {
    "undisturbed": (1.0, ("none",)),
    "end_of_epoch": (1.0, ("train:5", "none")),
    "in_validation": (1.0, ("val:6", "none")),
    "killed_in_the_save": (1.0, ("train:1", "train:3 killed", "none")),
    "undisturbed_often": (3, ("none",)),
    "often": (3, ("train:0", "train:2", "val:3", "val:12", "none")),
}
"""How often to validate, and the stops."""


class Module(pl.LightningModule):
    def __init__(self, stop: str, notes: Path) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.stop, self.notes = stop, notes

    def note(self, *what: Any) -> None:
        with self.notes.open("a") as file:
            print(*what, file=file)

    def stop_here(self, where: str) -> None:
        if self.stop.partition(" ")[0] == f"{where}:{self.global_step}":
            os.kill(os.getpid(), signal.SIGTERM)
            while not install.controller().stop_request:
                time.sleep(0.001)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.note("step", self.global_step, "of epoch", self.current_epoch)
        self.stop_here("train")
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.note("trained", self.global_step)

    def validation_step(self, batch: Any, index: int) -> None:
        if not self.trainer.sanity_checking:
            self.note("validation", index, "at", self.global_step)
            if index == 1:
                self.stop_here("val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class KilledIO(TorchCheckpointIO):
    """Half of the file is written."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path)
        os.truncate(path, Path(path).stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def attempt(name: str, place: Path, stop: str) -> None:
    """One start of a scene's script."""
    checkpoint = ModelCheckpointHF(dirpath=place)
    suspended = place / f"{checkpoint.CHECKPOINT_NAME_SUSPEND}.ckpt"
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, val_check_interval=SCENES[name][0], logger=False,
        callbacks=[checkpoint], plugins=[KilledIO()] if "killed" in stop else [],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(0)
    module = Module(stop, place / "notes")
    if suspended.exists():
        module.note("file", hashlib.sha256(suspended.read_bytes()).hexdigest())
    data, validated = (DataLoader(TensorDataset(torch.randn(n, 4)), batch_size=1) for n in (6, 3))
    path = suspended if suspended.exists() else None
    trainer.fit(module, data, validated, ckpt_path=path)
    module.note("done", trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped)
    module.note("left", sorted(path.name for path in place.glob("suspended*")))


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    found = {
        name: attempts(attempt, name, Path(sys.argv[1]) / name, stops)
        for name, (_, stops) in SCENES.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
