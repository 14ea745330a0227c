"""A data module that keeps its data set, as nearly all do; the module keeps the transform, too."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from structures import dataset
from torch.utils.data import DataLoader


class Data(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.train = dataset()

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 4, shuffle=True)


class Net(L.LightningModule):
    def __init__(self, data: Data) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 4)
        self.seen_by = [data]

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        print("=", self.global_step, repr(loss.item()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


L.seed_everything(0, verbose=False)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
data = Data()
L.Trainer(accelerator="cpu", max_epochs=3, **quiet).fit(Net(data), datamodule=data)
