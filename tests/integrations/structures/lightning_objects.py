"""A module and a callback with a generator, a meter, and a teacher in a list."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset


class Meter:
    def __init__(self) -> None:
        self.total, self.seen = 0.0, []


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.rng = torch.nn.Linear(4, 4), np.random.default_rng(3)
        self.teachers = [copy.deepcopy(self.net)]

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.teachers[0].weight.data.lerp_(self.net.weight.data, 0.1)
        noisy = batch[0] + float(self.rng.normal())
        return (self.net(noisy) - self.teachers[0](noisy).detach() / 2).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Measure(L.Callback):
    def __init__(self) -> None:
        self.meter, self.rng = Meter(), np.random.RandomState(2)

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, *_: Any) -> None:
        self.meter.total += out["loss"].item() * self.rng.rand()
        self.meter.seen.append(self.meter.total)
        print("=", trainer.global_step, self.meter.seen[-2:], len(self.meter.seen))


L.seed_everything(0, verbose=False)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = L.Trainer(accelerator="cpu", max_epochs=3, callbacks=[Measure()], **quiet)
trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True))
