"""HFAI's published shape of a training with Lightning, with its imports changed."""

import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from hydroslurm.compat.hfai import HFAIEnvironment, ModelCheckpointHF, nn_to_hfai


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(512))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        return self.weight * (x - mean) / torch.sqrt(variance + 1e-5)


class ToyNetModule(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 512), Norm(), torch.nn.ReLU())

    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        print(f"step {self.trainer.global_step}\n", end="", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def main() -> None:
    environment = HFAIEnvironment()
    checkpoint = ModelCheckpointHF(dirpath="checkpoints")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=environment.devices,
        num_nodes=environment.num_nodes,
        strategy="ddp_bind_numa",
        plugins=[environment],
        max_epochs=2,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
    )
    suspended = Path("checkpoints", f"{checkpoint.CHECKPOINT_NAME_SUSPEND}.ckpt")
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(400, 16)), batch_size=4)
    model = nn_to_hfai(ToyNetModule())
    trainer.fit(model, data, ckpt_path=suspended if suspended.exists() else None)
    print("done at", trainer.global_step, suspended.exists(), os.getpid())


if __name__ == "__main__":
    main()
