"""Two fits of one Trainer whose model is pruned as it goes, over a loader that combines two."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(torch.cat([batch["a"][0], batch["b"][0]])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


L.seed_everything(0, verbose=False)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
loaders = {
    name: DataLoader(TensorDataset(torch.randn(rows, 4)), 4, shuffle=True)
    for name, rows in (("a", 24), ("b", 16))
}
pruning = ModelPruning("l1_unstructured", amount=0.2, parameters_to_prune=None)
trainer = L.Trainer(accelerator="cpu", max_epochs=3, callbacks=[pruning], **quiet)
trainer.fit(Net(), CombinedLoader(loaders, "max_size_cycle"))
