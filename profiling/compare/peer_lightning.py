"""Lightning with SLURMEnvironment, as its page on Slurm asks for: `#SBATCH --signal=SIGUSR1@90`,
srun, auto_requeue left on. ModelCheckpoint saves after every epoch."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import lightning
import torch
from digits import Parts, arguments
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from observer import Observer
from torch import nn


class Digits(lightning.LightningModule):
    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.model = parts.model
        self._parts = [parts]  # in a list: it is no submodule

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> Any:
        parts = self._parts[0]
        scheduler = {"scheduler": parts.scheduler, "interval": "step"}
        return {"optimizer": parts.optimizer, "lr_scheduler": scheduler}


class Observed(Callback):
    """Begins when the checkpoint has been loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self._observer = Observer(self._folder, trainer.global_step).__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._observer.made(trainer.global_step)

    def on_train_end(self, *_: Any) -> None:
        self._observer.__exit__(None, None, None)


def newest(folder: Path) -> Path | None:
    """Lightning itself would take its newest hpc_ckpt, also where an epoch's save is younger."""
    found = [*folder.glob("hpc_ckpt_*.ckpt"), *folder.glob("epochs/last.ckpt")]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def main() -> None:
    config = arguments()
    parts = Parts(config)
    trainer = lightning.Trainer(
        max_epochs=config.epochs,
        accelerator="cpu",
        devices=1,
        default_root_dir=config.folder,
        plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)],
        callbacks=[
            ModelCheckpoint(
                dirpath=config.folder / "epochs", save_last=True, save_on_train_epoch_end=True
            ),
            Observed(config.folder / "attempts"),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(parts), parts.loader(0), ckpt_path=newest(config.folder), weights_only=False)
    parts.finished(trainer.global_step)


if __name__ == "__main__":
    main()
