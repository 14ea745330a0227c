"""A script for the tests of Lightning's strategies by name: STRATEGY, as a rank of torchrun's."""

from __future__ import annotations

import sys

import lightning.pytorch as pl
import torch

import hydroslurm.integrations.lightning  # noqa: F401 - registers the strategies
from hydroslurm.integrations.lightning_strategies import HydroslurmEnvironment


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.line = torch.nn.Linear(7, 3)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.line(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    environment = HydroslurmEnvironment()
    trainer = pl.Trainer(
        strategy=sys.argv[1],
        plugins=[environment],
        num_nodes=environment.num_nodes,
        devices=environment.devices,
        accelerator="cpu",
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(64, 7, generator=torch.Generator().manual_seed(1))
    model = Line()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    total = sum(float(one.detach().double().sum()) for one in model.parameters())
    # one write for each rank: lines of two would come in between
    print(f"rank {trainer.global_rank} step {trainer.global_step} sum {total!r}\n", end="")
