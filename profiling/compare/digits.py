"""The digits training that is preempted for comparison: model, optimizer, scheduler and data, the
same for everybody, and the ways to train them by hand."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from demo_digits import digits_tensors, hash_weights, make_deterministic, make_model
from observer import Observer

SEED = 0


@dataclass(frozen=True)
class Config:
    """What a training is given; ``think_s``: so long a step also waits, as for a device."""

    folder: Path
    epochs: int
    width: int
    think_s: float
    batch_size: int = 4


def arguments() -> Config:
    """As the comparison's scripts are called: ``SCRIPT ... FOLDER EPOCHS WIDTH THINK_S``."""
    folder, epochs, width, think_s = sys.argv[-4:]
    return Config(Path(folder), int(epochs), int(width), float(think_s))


class Device(nn.Module):
    """What a step waits for where the work is done elsewhere."""

    def __init__(self, think_s: float) -> None:
        super().__init__()
        self.think_s = think_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.think_s:
            time.sleep(self.think_s)
        return x


class Parts:
    """Model, optimizer, scheduler and data."""

    def __init__(self, config: Config) -> None:
        make_deterministic(SEED)
        images, labels, _, _ = digits_tensors(seed=SEED)
        self.config = config
        self.data = TensorDataset(images, labels)
        self.steps_per_epoch = -(-len(self.data) // config.batch_size)
        layers = make_model(width=config.width)
        self.model = nn.Sequential(nn.Dropout(0.1), *layers, Device(config.think_s))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, T_max=config.epochs * self.steps_per_epoch
        )

    def loader(self, epoch: int) -> DataLoader[tuple[torch.Tensor, ...]]:
        """The batches of one epoch, in an order of its own."""
        order = torch.Generator().manual_seed(SEED + epoch)
        return DataLoader(
            self.data, batch_size=self.config.batch_size, shuffle=True, generator=order
        )

    def save(self, file: Path, step: int) -> None:
        """As people write it: all that is known of the training, in a file that is replaced in one
        step."""
        part = file.with_suffix(f".{os.getpid()}")
        state = {name: one.state_dict() for name, one in self.kept().items()}
        torch.save({**state, "step": step, "rng": torch.get_rng_state()}, part)
        part.replace(file)

    def load(self, file: Path) -> int:
        """The step that was saved; 0: there is nothing yet."""
        if not file.exists():
            return 0
        state = torch.load(file)
        for name, one in self.kept().items():
            one.load_state_dict(state[name])
        torch.set_rng_state(state["rng"])
        step: int = state["step"]
        return step

    def kept(self) -> dict[str, Any]:
        """What is saved, by name."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def learn(self, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def finished(self, step: int) -> dict[str, Any]:
        """The outcome; also left in ``done.json``, with the moment."""
        result = {"steps": step, "weights_sha256": hash_weights(self.model)}
        mark = self.config.folder / "done.json"
        part = mark.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({**result, "mono_ns": time.monotonic_ns()}))
        part.replace(mark)
        return result


def train_in_a_run(config: Config) -> dict[str, Any]:
    """With ``hydroslurm.Run``, which saves as often as the others, and after a loss as often as
    that pays; the outcome."""
    import hydroslurm
    from hydroslurm.data import ResumableSampler

    parts = Parts(config)
    sampler = ResumableSampler(parts.data, seed=SEED)
    with hydroslurm.Run(
        model=parts.model,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        loader=DataLoader(parts.data, batch_size=config.batch_size, sampler=sampler),
        directory=config.folder / "run",
        every_steps=parts.steps_per_epoch,
        every_s=60,
    ) as run:
        run.resume()
        with Observer(config.folder / "attempts", run.step) as observer:
            for batch in run.batches(epochs=config.epochs):
                parts.learn(batch)
                observer.made(run.step + 1)
        return parts.finished(run.step)


class ByHand:
    """As people write it: a loop, and a checkpoint after each epoch of all that one can think of
    (model, optimizer, scheduler, position in the epoch, random numbers). For stock submitit it is
    what its docs/checkpointing.md asks for: a callable with a ``checkpoint`` method, which saves
    and returns a fresh callable, and runs inside a signal handler, wherever the training is.

    Args:
        inside: made of the model, and held around the loop.
    """

    def __init__(
        self,
        config: Config,
        inside: Callable[[nn.Module], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.config = config
        self.inside = inside
        self.parts: Parts | None = None
        self.step = 0

    def __call__(self) -> dict[str, Any]:
        self.parts = parts = Parts(self.config)
        self.step = parts.load(self.config.folder / "checkpoint.pt")
        observed = Observer(self.config.folder / "attempts", self.step)
        with self.inside(parts.model), observed as observer:
            for epoch in range(self.step // parts.steps_per_epoch, self.config.epochs):
                done = self.step % parts.steps_per_epoch
                for batch in itertools.islice(parts.loader(epoch), done, None):
                    parts.learn(batch)
                    self.step += 1
                    observer.made(self.step)
                self.save()
        return parts.finished(self.step)

    def checkpoint(self) -> Any:
        import submitit

        if self.parts is not None:
            self.save()
        return submitit.helpers.DelayedSubmission(ByHand(self.config, self.inside))

    def save(self) -> None:
        assert self.parts is not None
        self.parts.save(self.config.folder / "checkpoint.pt", self.step)
