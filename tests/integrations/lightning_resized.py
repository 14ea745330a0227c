"""A Lightning training that goes on with other numbers of ranks in the middle of an epoch:
``lightning_resized.py FOLDER RANKS:STEP...``. Each attempt's last rank gets a SIGTERM in the batch
behind that step; the last attempt has none. Prints the exit statuses and all notes as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from attempts import attempts
from processes import wait_until
from torch.utils.data import DataLoader, Dataset

from hydroslurm.data import ResumableSampler
from hydroslurm.integrations.lightning import Preemptible
from hydroslurm.runtime.install import controller

SAMPLES = 67


class Places(Dataset[torch.Tensor]):
    """Each sample is its place in the epoch's order: 67 and more are repeats."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor([float(index.position)])


class Module(lightning.LightningModule):
    def __init__(self, notes: Path, stop: str) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self._notes, self._stop = notes, int(stop or -1)

    def _note(self, *what: object) -> None:
        with self._notes.open("a") as notes:
            print(json.dumps([self.current_epoch, *what]), file=notes)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self._note("trained", [int(one) for one in batch.flatten().tolist()])
        if self.global_step == self._stop and self.global_rank == self.trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: controller().stop_request, "the stop")  # steps are faster than that
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self._note("validated", index)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-6)


def attempt(_: str, folder: Path, stop: str) -> None:
    torch.set_num_threads(1)
    data = Places()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp",
        max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, num_sanity_val_steps=0, use_distributed_sampler=False,
        callbacks=[Preemptible(directory=folder / "run", every_s=0, every_steps=0)],
    )  # fmt: skip
    loader = DataLoader(data, 4, sampler=ResumableSampler(data, seed=1))
    module = Module(folder / f"notes-{os.getpid()}", stop)
    trainer.fit(module, loader, DataLoader([torch.zeros(1)], 1))


def main(folder: Path, *told: str) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    exits, notes = [], []
    for world, _, stop in (one.partition(":") for one in told):
        ended, notes = attempts(attempt, "resized", folder, [stop], world=int(world))
        exits.append(ended)
    print(json.dumps({"exits": exits, "notes": [json.loads(one) for one in notes]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
