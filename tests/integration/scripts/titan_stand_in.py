"""torchtitan's interface between its trainer and its checkpoint manager, and nothing else of it:
the modules, names and calls of its main branch of August 2026, around a model of two layers.

``titan_stand_in.py FOLDER STOP``, with the recipe beside it as preemptible.py: a stop is asked for
at that step and heard, before its end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

STEPS = 5


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **kwargs: Any) -> Any:
            assert self._owner is not None
            return self._owner(config=replace(self), **kwargs)

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            cls.Config._owner = cls


class BaseCheckpointManager(Configurable, ABC):
    enable: bool
    save_future: Any

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = False
        folder: str = "checkpoint"
        interval: int = 500
        keep_latest_k: int = 10
        load_step: int = -1

    def load(self, step: int = -1) -> bool:
        return self.enable and self._load(step)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        return self.enable and self._save(curr_step, last_step)

    def maybe_wait_for_staging(self) -> None:
        if self.enable:
            self._maybe_wait_for_staging()

    def maybe_wait_for_saving(self) -> None:
        if self.enable and self.save_future is not None:
            self._wait_for_saving()

    def close(self) -> None:
        if getattr(self, "enable", False):
            self._close()

    @abstractmethod
    def _load(self, step: int = -1) -> bool: ...
    @abstractmethod
    def _save(self, curr_step: int, last_step: bool = False) -> bool: ...

    # and _wait_for_saving(), _maybe_wait_for_staging(), _close()


class Stateful:
    """Its state is some of its attributes."""

    state: tuple[str, ...]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Loader(Stateful):
    state = ("at",)
    at = 0

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield torch.full((4, 3), float(self.at))


class Optimizers:
    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in parts]


class Schedulers:
    def __init__(self, optimizers: Optimizers) -> None:
        decay = torch.optim.lr_scheduler.LambdaLR
        self.schedulers = [decay(one, lambda n: 1 / (1 + n)) for one in optimizers.optimizers]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one in self.schedulers:
            one.last_epoch = state["last_epoch"]


class Trainer(Configurable, Stateful):
    state = ("step", "ntokens_seen")

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dump_folder: str = "./outputs"
        checkpoint: Any = field(default_factory=BaseCheckpointManager.Config)

    def __init__(self, config: Any) -> None:
        torch.manual_seed(0)
        self.config, self.step, self.ntokens_seen = config, 0, 0
        self.model_parts = [nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))]
        self.dataloader = Loader()
        self.optimizers = Optimizers(self.model_parts)
        self.lr_schedulers = Schedulers(self.optimizers)
        parts = ("dataloader", "model_parts", "optimizers", "lr_schedulers")
        self.checkpointer = config.checkpoint.build(
            **{name: getattr(self, name) for name in parts},
            states={"train_state": self},
            sd_adapter=None,
            base_folder=config.dump_folder,
        )

    def train(self) -> None:
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        batches = iter(self.dataloader)
        while self.should_continue_training():
            self.step += 1
            self.train_step(next(batches))
            self.checkpointer.save(self.step, last_step=(self.step == STEPS))

    def train_step(self, batch: torch.Tensor) -> None:
        for optimizer in self.optimizers.optimizers:
            optimizer.zero_grad()
        loss = (self.model_parts[0](batch) - batch[:, :1]).square().mean()
        loss.backward()
        self.checkpointer.maybe_wait_for_staging()
        for one in (*self.optimizers.optimizers, *self.lr_schedulers.schedulers):
            one.step()
        self.ntokens_seen += batch.numel()
        print("loss", self.step, self.ntokens_seen, loss.item().hex(), flush=True)
        if self.step == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
            while not self.checkpointer.run.stop_requested:
                time.sleep(0.001)

    def should_continue_training(self) -> bool:
        return self.step < STEPS

    def close(self) -> None:
        self.checkpointer.close()


def main(folder: str) -> None:
    import preemptible

    config = preemptible.llama3_debugmodel()
    config.dump_folder = folder
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
    weights = [one.double().sum().item().hex() for one in trainer.model_parts[0].parameters()]
    print("weights", weights)


if __name__ == "__main__":
    STOP = int(sys.argv[2])
    main(sys.argv[1])
