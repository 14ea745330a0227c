"""A classifier of scikit-learn's digits, as people write it with Lightning: a data module, workers,
accumulation, ModelCheckpoint, early stopping. Knows nothing of preemption."""

import argparse
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


class Digits(L.LightningDataModule):
    def __init__(self, batch_size: int, workers: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
        whole = TensorDataset(images, torch.tensor(data.target))
        self.train, self.val = random_split(
            whole, [1200, 597], generator=torch.Generator().manual_seed(0)
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            self.train, self.hparams.batch_size, shuffle=True, num_workers=self.hparams.workers
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 200)


class Classifier(L.LightningModule):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(16 * 16, 10),
        )  # fmt: skip
        self.accuracy = MulticlassAccuracy(10)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        images = images + 0.05 * torch.randn_like(images)
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        scores = self.net(images)
        self.accuracy(scores, labels)
        self.log("val_loss", nn.functional.cross_entropy(scores, labels), sync_dist=True)
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-2, total_steps=self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Slow(L.Callback):
    """Stands for a larger model."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_train_batch_end(self, trainer, *_) -> None:
        time.sleep(self.pause_s)
        print("step", trainer.global_step, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    counts = {"epochs": 4, "devices": 1, "nodes": 1, "workers": 2, "accumulate": 1}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pause-s", type=float, default=0.0)
    args = parser.parse_args()

    L.seed_everything(42, workers=True)
    callbacks = [
        ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True),
        EarlyStopping("val_loss", patience=3),
        *([Slow(args.pause_s)] if args.pause_s else []),
    ]
    trainer = L.Trainer(
        accelerator="cpu", devices=args.devices, num_nodes=args.nodes, max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate, logger=CSVLogger("logs"), log_every_n_steps=1,
        callbacks=callbacks, enable_progress_bar=False,
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, datamodule=Digits(batch_size=16, workers=args.workers))
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
