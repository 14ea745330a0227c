"""A data module that counts, and makes another loader for each epoch."""

from __future__ import annotations

import random
import sys
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.made, self.rng = 0, random.Random(3)

    def train_dataloader(self) -> Any:
        self.made += 1
        by = self.trainer.current_epoch if "by-epoch" in sys.argv else self.made
        rows = torch.randn(24 + 4 * by, 4, generator=torch.Generator().manual_seed(by))
        return DataLoader(TensorDataset(rows), 4, shuffle=True)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + self.rng.random()]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


L.seed_everything(0, verbose=False)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
every = 2 if "every-2" in sys.argv else 1
L.Trainer(accelerator="cpu", max_epochs=4, reload_dataloaders_every_n_epochs=every, **quiet).fit(
    Net(), datamodule=Data()
)
