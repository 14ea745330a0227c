"""The digits training that is preempted for comparison: model, optimizer, scheduler and data, the
same for everybody. submitit is not imported here."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from train import digits_tensors, hash_weights, make_deterministic, make_model

BATCH_SIZE = 16
SEED = 0


@dataclass(frozen=True)
class Config:
    """What a training is given. It is as slow as ``think_s`` says until there is a file ``hurry``
    in its folder."""

    folder: Path
    epochs: int = 40
    think_s: float = 0.04
    batch_size: int = BATCH_SIZE
    width: int = 8


class Parts:
    """Model, optimizer, scheduler and data."""

    def __init__(self, config: Config) -> None:
        make_deterministic(SEED)
        images, labels, _, _ = digits_tensors(seed=SEED)
        self.config = config
        self.data = TensorDataset(images, labels)
        self.steps_per_epoch = -(-len(self.data) // config.batch_size)
        self.model = nn.Sequential(nn.Dropout(0.1), *make_model(width=config.width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, T_max=config.epochs * self.steps_per_epoch
        )
        self._hurry = config.folder / "hurry"

    def loader(self, epoch: int) -> DataLoader[tuple[torch.Tensor, ...]]:
        """The batches of one epoch, in an order of its own."""
        order = torch.Generator().manual_seed(SEED + epoch)
        return DataLoader(
            self.data, batch_size=self.config.batch_size, shuffle=True, generator=order
        )

    def save(self, file: Path, step: int) -> None:
        """As people write it: all that is known of the training, in a file that is replaced in one
        step."""
        part = file.with_suffix(f".{os.getpid()}")
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": step,
            "rng": torch.get_rng_state(),
        }
        torch.save(state, part)
        part.replace(file)

    def load(self, file: Path) -> int:
        """The step that was saved; 0: there is nothing yet."""
        if not file.exists():
            return 0
        state = torch.load(file)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        step: int = state["step"]
        return step

    def learn(self, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        if self.config.think_s and not self._hurry.exists():
            time.sleep(self.config.think_s)  # it is here that a large model spends its time
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()


def outcome(parts: Parts, step: int) -> dict[str, Any]:
    return {"steps": step, "weights_sha256": hash_weights(parts.model)}
