"""Trainings of several ranks with Lightning, each stopped and resumed as told:
``lightning_ranks.py SCENE WORLD FOLDER STOP...``. Prints what all ranks have noted in all attempts,
beside an undisturbed run's, as JSON.

A stop is ``train:N@R``: rank R gets a SIGTERM behind the N-th training batch of the run, from 0; or
``val:N@R``, in the N-th validation batch of its attempt.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import torch
from attempts import attempts
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from hydroslurm.integrations.lightning import Preemptible


class OnCpu(FSDPStrategy):
    """Lightning wants a GPU for "fsdp", by name and by class, and torch takes none for granted."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(
            model, sharding_strategy=self.sharding_strategy, device_id=torch.device("cpu"),
            **self.kwargs,
        )  # fmt: skip


class Module(lightning.LightningModule):
    """Layers of odd sizes, one of them frozen, that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(20, 35), torch.nn.BatchNorm1d(35), torch.nn.Dropout(0.3),
            torch.nn.Linear(35, 27), torch.nn.Tanh(), torch.nn.Linear(27, 7),
        )  # fmt: skip
        self.net[0].bias.requires_grad_(False)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("v", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Sharded(Module):
    """By FSDP2, in the hook that Lightning has for it."""

    def configure_model(self) -> None:
        if any(type(one).__name__.startswith("FSDP") for one in self.modules()):
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[3], self.net):
            fully_shard(layer, mesh=mesh)


class Notes(lightning.Callback):
    """Writes down each step, and sends the signal."""

    def __init__(self, folder: Path, stop: str) -> None:
        rank = os.environ["RANK"]
        place, _, whose = stop.partition("@")
        self._at, _, number = place.partition(":")
        self._number = int(number) if whose == rank else -1
        self._path = folder / f"notes-{rank}"
        self._attempt = SimpleNamespace(seen=0)  # in a form that is not saved

    def note(self, *what: object) -> None:
        with self._path.open("a") as notes:
            print(*what, file=notes)

    def _stop(self, at: str, number: int) -> None:
        if (at, number) == (self._at, self._number):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        self.note("step", trainer.global_step, i, repr(out["loss"].item()))
        self._stop("train", trainer.fit_loop.total_batch_idx)

    def on_validation_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._stop("val", self._attempt.seen)
        self._attempt.seen += not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        shown = {name: repr(value.item()) for name, value in trainer.callback_metrics.items()}
        self.note("epoch", trainer.current_epoch, sorted(shown.items()))


SCENES: dict[str, Any] = {
    "ddp": (Module, lambda: DDPStrategy(bucket_cap_mb=0.001)),
    "fsdp": (Module, lambda: OnCpu(auto_wrap_policy={torch.nn.Linear})),
    "fsdp grad_op": (Module, lambda: OnCpu(sharding_strategy="SHARD_GRAD_OP")),
    "fsdp flat": (Module, lambda: OnCpu(sharding_strategy="NO_SHARD", use_orig_params=False)),
    "fsdp2": (Sharded, functools.partial(ModelParallelStrategy, tensor_parallel_size=1)),
}
"""The module, and what makes the strategy."""


def attempt(name: str, folder: Path, stop: str) -> None:
    """One rank's training, from its beginning or from where the last one was stopped."""
    torch.set_num_threads(1)
    lightning.seed_everything(3, verbose=False)
    world = int(os.environ["WORLD_SIZE"])
    kind, strategy = SCENES[name]
    made = strategy(data_parallel_size=world) if kind is Sharded else strategy()
    notes = Notes(folder, stop)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world, strategy=made, max_epochs=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        accumulate_grad_batches=2, default_root_dir=folder,
        callbacks=[notes, Preemptible(directory=folder, every_s=0, every_steps=0)],
    )  # fmt: skip
    module = kind() if name != "fsdp flat" else Flat()
    data = torch.randn(40 * world, 20, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(data, 5, shuffle=True), DataLoader(data, 20))
    weights = hashlib.sha256()
    for one in trainer.model.state_dict().values():  # which shards all, or gathers all
        local = one.to_local() if hasattr(one, "to_local") else one
        weights.update(local.detach().numpy().tobytes())
    notes.note("weights", weights.hexdigest())


class Flat(Module):
    """With flat parameters the optimizer is made of what the strategy has made."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].bias.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.trainer.model.parameters(), 0.02)


def main(name: str, world: str, folder: Path, *stops: str) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    found: dict[str, Any] = {}
    for run, told in (("undisturbed", ("",)), ("stopped", (*stops, ""))):
        place = folder / run
        found[f"{run}_exits"], found[run] = attempts(attempt, name, place, told, world=int(world))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
