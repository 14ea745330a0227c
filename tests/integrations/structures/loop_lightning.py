"""Lightning over one of the structures."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from structures import after_step, dataset, loading
from torch.utils.data import DataLoader


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        after_step(self.trainer.train_dataloader, self.global_step, loss.item())
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        print("=", self.current_epoch, repr(self.trainer.callback_metrics["loss"].item()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


L.seed_everything(0, verbose=False)
data = dataset()
trainer = L.Trainer(
    accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Net(), DataLoader(data, **loading(data)))
