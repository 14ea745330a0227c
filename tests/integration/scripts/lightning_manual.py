"""A classifier of scikit-learn's digits with Lightning's manual optimisation: two optimizers, which
step at every N-th batch, and a stream without a length, parted among ranks and workers. Knows
nothing of preemption."""

import argparse
import time

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

ITEMS = 1536


class Stream(IterableDataset):
    """Images in an order that is drawn when it is asked for, with noise."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        data = load_digits()
        self.images = torch.tensor(data.data[:ITEMS], dtype=torch.float32) / 16
        self.labels = torch.tensor(data.target[:ITEMS])

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        own = torch.arange(self.rank * workers + number, ITEMS, self.ranks * workers)
        for index in own[torch.randperm(len(own))].tolist():
            image = self.images[index]
            yield image + 0.05 * torch.randn_like(image), self.labels[index]


class Classifier(L.LightningModule):
    def __init__(self, workers: int, accumulate: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(64, 10)

    def train_dataloader(self) -> DataLoader:
        stream = Stream(self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(stream, 16, num_workers=self.hparams.workers)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.head(self.body(images)), labels)
        self.manual_backward(loss / self.hparams.accumulate)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if (batch_idx + 1) % self.hparams.accumulate == 0:
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, gradient_clip_val=1.0)
                optimizer.step()
                optimizer.zero_grad()
            self.lr_schedulers().step()

    def configure_optimizers(self):
        body = torch.optim.SGD(self.body.parameters(), lr=0.1, momentum=0.9)
        head = torch.optim.AdamW(self.head.parameters(), lr=1e-2)
        return [body, head], [torch.optim.lr_scheduler.ExponentialLR(body, 0.99)]


class Slow(L.Callback):
    """Stands for a larger model."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_train_batch_end(self, trainer, *_) -> None:
        time.sleep(self.pause_s)
        print("step", trainer.global_step, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=0.0)
    args = parser.parse_args()

    L.seed_everything(42, workers=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        logger=CSVLogger("logs"),
        log_every_n_steps=1,
        callbacks=[Slow(args.pause_s)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier(args.workers, args.accumulate)
    trainer.fit(model)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
