"""Train on handwritten digits with Lightning. Nothing in this file is hydroslurm's.

HYDROSLURM_PREEMPT=requeue python train_lightning.py       # SIGTERM saves; again: resumes
srun --preempt=requeue python train_lightning.py           # on Slurm, in a batch script
"""

from __future__ import annotations

import argparse
import time

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self, think_s: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
        self.think_s = think_s

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(self.think_s)
        if self.global_step % 10 == 0:
            print(f"step {self.global_step}", flush=True)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data (10)")
    parser.add_argument("--think-s", type=float, default=0.0, help="sleep in each step (0)")
    args = parser.parse_args()
    L.seed_everything(1)
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)  # 1,797 images of 8 x 8 pixels
    model = Classifier(args.think_s)
    trainer = L.Trainer(max_epochs=args.epochs, enable_progress_bar=False)
    trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))  # no ckpt_path
    with torch.no_grad():
        right = model.eval().net(data.tensors[0]).argmax(1) == labels
    print(f"accuracy {right.float().mean().item():.2%} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
