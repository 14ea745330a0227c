"""Manual optimisation: one network steps with each batch, the other adds up over four."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Gan(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, index: int) -> None:
        maker, critic = self.optimizers()
        made = self.maker(torch.randn_like(batch[0]))
        critic.zero_grad()
        self.manual_backward((self.critic(made.detach()) - self.critic(batch[0])).mean())
        critic.step()
        self.manual_backward(-self.critic(made).mean() / 4)
        if index % 4 == 3:
            maker.step()
            maker.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(one.parameters(), lr=0.02) for one in (self.maker, self.critic)]


L.seed_everything(0, verbose=False)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = L.Trainer(accelerator="cpu", max_epochs=3, **quiet)
trainer.fit(Gan(), DataLoader(TensorDataset(torch.randn(32, 4)), 4, shuffle=True))
