"""Lightning's callbacks that try out a learning rate or a batch size when a fit begins."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.lr, self.batch_size = torch.nn.Linear(4, 4), 0.1, 2

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
        return DataLoader(data, self.batch_size, shuffle=True)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        print("=", self.trainer.global_step, len(batch[0]), self.lr, repr(loss.item()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


L.seed_everything(0, verbose=False)
finders = {
    "rate": LearningRateFinder(num_training_steps=8),
    "size": BatchSizeFinder(mode="power", steps_per_trial=1, max_trials=2),
}
L.Trainer(
    accelerator="cpu", max_epochs=2, callbacks=[finders[sys.argv[1]]], logger=False,
    enable_progress_bar=False,
).fit(Net())  # fmt: skip
