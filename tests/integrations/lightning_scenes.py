"""Trainings with Lightning: ``lightning_scenes.py SCENE``. Prints what they train and log, in lines
that begin with "="."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import callbacks as stock
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from stops import reach
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

EPOCHS = 3


class Noisy(Dataset):
    """Augmentation that draws from two kinds of random numbers."""

    def __init__(self) -> None:
        self.data = torch.randn(44, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index] + torch.randn(8) * 0.1 + random.random() * 0.1


class Stream(IterableDataset):
    """Without a length, and drawing while it gives."""

    def __iter__(self) -> Any:
        data = Noisy()
        for index in torch.randperm(len(data)).tolist():
            yield data[index]


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3),
            torch.nn.Linear(8, 1),
        )  # fmt: skip
        self.mean = MeanMetric()
        self.outputs: list[torch.Tensor] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0] if isinstance(batch, (list, tuple)) else batch).pow(2).mean()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        if self.outputs:
            self.log("outputs", torch.stack(self.outputs).mean())
            self.outputs.clear()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("v", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "v"}}


class Several(Module):
    """Batches of two loaders, of which the shorter begins anew."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return super().training_step([torch.cat([batch["a"], batch["b"]])], index)


class OneCycle(Module):
    """A scheduler that steps with each batch, and none that waits for the validation."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Thawed(Module):
    """Its optimizer has what is trained from the beginning."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], 0.05)


class Scaled(Module):
    """In float16: the first steps overflow, and the scale follows."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.log("scale", self.trainer.precision_plugin.scaler.get_scale(), on_epoch=True)
        return super().training_step(batch, index)


class Adversaries(Module):
    """Optimized by hand: one network steps with each batch, the other adds up over four."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization, self.critic = False, torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        maker, critic = self.optimizers()
        made = self.net(batch)
        critic.zero_grad()
        self.manual_backward((self.critic(made.detach()) - self.critic(batch[:, :1])).mean())
        critic.step()
        loss = -self.critic(made).mean() / 4
        self.manual_backward(loss)
        if index % 4 == 3:
            maker.step()
            maker.zero_grad()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(one.parameters(), 0.02) for one in (self.net, self.critic)]


class Thaw(stock.BaseFinetuning):
    """Trains a part of the model from the second epoch on; and nothing of another in the first."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[:2])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        pl_module.net[2].p = 0.3 - 0.1 * epoch
        pl_module.net[1].train(epoch > 1)
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[:2], optimizer, lr=0.01)


class OnCpu(FSDPStrategy):
    """Lightning wants a GPU for "fsdp", by name and by class, and torch takes none for granted."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(
            model, sharding_strategy=self.sharding_strategy, device_id=torch.device("cpu"),
            **self.kwargs,
        )  # fmt: skip


class OfRanks(lightning.LightningModule):
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


class Sharded(OfRanks):
    """By FSDP2, in the hook that Lightning has for it."""

    def configure_model(self) -> None:
        if any(type(one).__name__.startswith("FSDP") for one in self.modules()):
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[3], self.net):
            fully_shard(layer, mesh=mesh)


class Flat(OfRanks):
    """With flat parameters the optimizer is made of what the strategy has made."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].bias.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.trainer.model.parameters(), 0.02)


class Shown(lightning.Callback):
    """Prints each step and each epoch; has an average of a model that is not sharded."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._average = copy.deepcopy(module.net) if isinstance(module, Module) else None

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._began_at = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        if self._average is not None:
            for mine, its in zip(self._average.parameters(), module.net.parameters(), strict=True):
                mine.data.lerp_(its.data, 0.1)
        rates = [one.param_groups[0]["lr"] for one in trainer.optimizers]
        print("= step", trainer.global_step, i, repr(out["loss"].item()), rates)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        shown = {name: repr(value.item()) for name, value in trainer.callback_metrics.items()}
        if self._average is not None:
            shown["average"] = repr(self._average[0].weight[0, 0].item())
        print("= epoch", trainer.current_epoch, self._began_at, sorted(shown.items()))
        reach("epoch")


def loader(**options: Any) -> DataLoader:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, **options)


def scene(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """Module, training data and the Trainer's options."""
    if name == "stream":
        return Module(), DataLoader(Stream(), batch_size=4), {}
    if name == "several":
        return Several(), {"a": loader(), "b": DataLoader(Noisy(), batch_size=8, shuffle=True)}, {}
    workers = {
        "workers": {"num_workers": 2, "persistent_workers": True},
        "half": {"num_workers": 2},
    }
    kind = KINDS.get(name, Module)
    return kind(), loader(**workers.get(name, {})), OPTIONS.get(name, lambda: {})()


KINDS: dict[str, type[Module]] = {
    "max_steps": OneCycle, "scaled": Scaled, "thaw": Thawed, "swa": OneCycle,
    "by hand": Adversaries,
}  # fmt: skip
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "accumulate": lambda: {"accumulate_grad_batches": 4, "val_check_interval": 3},
    "max_steps": lambda: {"max_steps": 22, "max_epochs": -1},
    "scaled": lambda: {
        "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler(
            "cpu", init_scale=2.0**22, growth_interval=4
        ))]
    },
    "thaw": lambda: {
        "callbacks": [Thaw(), stock.GradientAccumulationScheduler({0: 1, 1: 2})],
        "enable_checkpointing": False,
    },
    "swa": lambda: {"callbacks": [stock.StochasticWeightAveraging(0.01, 1)]},
    "fractions": lambda: {
        "val_check_interval": 0.25, "limit_val_batches": 2, "gradient_clip_val": 0.1
    },
    "half": lambda: {"limit_train_batches": 0.5, "num_sanity_val_steps": -1},
    "reload": lambda: {"reload_dataloaders_every_n_epochs": 1},
}  # fmt: skip
"""Of a Trainer."""


def strategies(world: int) -> dict[str, tuple[Any, Any]]:
    """The module and the strategy of a training of several ranks."""
    return {
        "ddp": (OfRanks(), DDPStrategy(bucket_cap_mb=0.001, gradient_as_bucket_view=True)),
        "fsdp": (OfRanks(), OnCpu(auto_wrap_policy={torch.nn.Linear})),
        "fsdp grad_op": (OfRanks(), OnCpu(sharding_strategy="SHARD_GRAD_OP")),
        "fsdp flat": (Flat(), OnCpu(sharding_strategy="NO_SHARD", use_orig_params=False)),
        "fsdp2": (Sharded(), ModelParallelStrategy(world, tensor_parallel_size=1)),
    }


def fit(
    module: Any, data: Any, options: dict[str, Any], *, validated: Any = None,
    ckpt_path: Path | None = None,
) -> None:  # fmt: skip
    extra = options.get("callbacks", [])
    trainer = lightning.Trainer(**{
        "accelerator": "cpu", "max_epochs": EPOCHS, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": bool(extra), **options, "callbacks": [Shown(), *extra],
    })  # fmt: skip
    workers = getattr(data, "num_workers", 0)
    validation = trainer.fit_loop.epoch_loop.val_loop
    own = validation.run
    validation.run = theirs = lambda: own()  # of somebody who replaces it as well
    validated = validated or DataLoader(Noisy().data, batch_size=8, num_workers=workers)
    trainer.fit(module, data, validated, ckpt_path=ckpt_path)
    assert validation.run is theirs
    weights = hashlib.sha256()
    for one in trainer.model.state_dict().values():  # which shards all, or gathers all
        local = one.to_local() if hasattr(one, "to_local") else one
        weights.update(local.detach().numpy().tobytes())
    print("= weights", weights.hexdigest())


def quiet() -> None:
    """Leave out what Lightning says of itself."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel("ERROR")


def main(name: str) -> None:
    quiet()
    torch.set_num_threads(1)
    lightning.seed_everything(3, verbose=False)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if name in (made := strategies(world)):
        module, strategy = made[name]
        data = torch.randn(40 * world, 20, generator=torch.Generator().manual_seed(1))
        options = {"strategy": strategy, "devices": world, "max_epochs": 2}
        loader_of_all = DataLoader(data, 20)
        options |= {"accumulate_grad_batches": 2}
        fit(module, DataLoader(data, 5, shuffle=True), options, validated=loader_of_all)
        return
    module, data, options = scene(name)
    if name == "own checkpoint":  # that Lightning has written in the middle of an epoch
        path = Path("bare.ckpt")
        if not path.exists():
            asked, os.environ["HYDROSLURM_PREEMPT"] = os.environ["HYDROSLURM_PREEMPT"], "off"
            bare = lightning.Trainer(
                accelerator="cpu", enable_checkpointing=False, logger=False, max_steps=5,
                max_epochs=-1, enable_progress_bar=False,
            )  # fmt: skip
            os.environ["HYDROSLURM_PREEMPT"] = asked
            bare.fit(Module(), loader(), loader())
            bare.save_checkpoint(path)
        lightning.seed_everything(4, verbose=False)
        fit(module, data, options, ckpt_path=path)
        return
    fit(module, data, options)
    if name == "twice":
        fit(module, data, options)


if __name__ == "__main__":
    main(sys.argv[1])
