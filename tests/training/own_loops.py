"""Loops that fetch their own batches, for tests: ``own_loops.py LOOP FOLDER [stop]``. With ``stop``
the first step of this attempt waits until a stop has been requested. Prints ``at STEP``, ``loss
STEP HEX``, and at its end ``bits HASH`` of weights, optimizers and the random numbers that come
next.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import hydroslurm

STEPS = 5


class Loop:
    """What is trained; ``step`` makes one step of it, and returns the loss."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        numpy.random.seed(0)
        random.seed(0)
        self.folder = folder

    def given(self) -> dict[str, Any]:
        """The arguments of Run."""
        return {}

    def more(self) -> Iterator[tuple[str, Any, bool]]:
        """What is registered: name, object, whether per rank."""
        yield from ()

    def step(self, number: int) -> torch.Tensor:
        raise NotImplementedError


class GetBatch(Loop):
    """Windows of a memory-mapped file, dropout, accumulation over two batches, a rate that is
    computed from the step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = folder / "train.bin"
        if not path.exists():
            numpy.random.RandomState(1).randint(0, 16, 500).astype(numpy.uint16).tofile(path)
        self.data = numpy.memmap(path, dtype=numpy.uint16, mode="r")
        self.model = nn.Sequential(
            nn.Embedding(16, 8), nn.Dropout(0.5), nn.Linear(8, 16), nn.Dropout(0.1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def given(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.data) - 8, (4,))
        rows = torch.stack(
            [torch.from_numpy(self.data[i : i + 8].astype(numpy.int64)) for i in starts]
        )
        return rows[:, :-1], rows[:, 1:]

    def step(self, number: int) -> torch.Tensor:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        self.optimizer.zero_grad()
        for _ in range(2):
            x, y = self.batch()
            loss = nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
            loss.backward()
        self.optimizer.step()
        return loss


class Gan(Loop):
    """Two models, two optimizers, two schedulers; noise of a generator of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.generator = nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.2), nn.Linear(6, 3))
        self.critic = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))
        self.adam = torch.optim.Adam(self.generator.parameters(), lr=0.05)
        self.sgd = torch.optim.SGD(self.critic.parameters(), lr=0.05)
        self.schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(one, 0.7) for one in (self.adam, self.sgd)
        ]
        self.noise = torch.Generator().manual_seed(5)

    def given(self) -> dict[str, Any]:
        return {"model": self.generator, "optimizer": self.adam, "scheduler": self.schedulers[0]}

    def more(self) -> Iterator[tuple[str, Any, bool]]:
        yield "critic", self.critic, False
        yield "critic_optimizer", self.sgd, False
        yield "critic_scheduler", self.schedulers[1], False
        yield "noise", self.noise, False

    def step(self, number: int) -> torch.Tensor:
        made = self.generator(torch.randn(4, 2, generator=self.noise))
        real = torch.randn(4, 3)
        self.sgd.zero_grad()
        (self.critic(made.detach()).mean() - self.critic(real).mean()).backward()
        self.sgd.step()
        self.adam.zero_grad()
        loss = -self.critic(made).mean()
        loss.backward()
        self.adam.step()
        for one in self.schedulers:
            one.step()
        return loss


class Pole:
    """An environment: a state that actions change, and wind from a generator of its own."""

    def __init__(self) -> None:
        self.wind = numpy.random.default_rng(3)
        self.place = 0.0

    def step(self, push: float) -> float:
        self.place += 0.1 * push + float(self.wind.normal(0, 0.1))
        return self.place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Reinforce(Loop):
    """A policy, an environment and a temperature that belongs to no module; generators of every
    kind."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.policy = nn.Linear(1, 2)
        self.temperature = torch.zeros(1, requires_grad=True)
        self.optimizer = torch.optim.Adam([*self.policy.parameters(), self.temperature], lr=0.1)
        self.pole = Pole()
        self.python = random.Random(7)
        self.legacy = numpy.random.RandomState(8)

    def given(self) -> dict[str, Any]:
        temperature = nn.ParameterList([self.temperature])
        return {"optimizer": self.optimizer, "extra": {"temperature": temperature}}

    def more(self) -> Iterator[tuple[str, Any, bool]]:
        yield "policy", self.policy, False
        yield "pole", self.pole, True
        yield "wind", self.pole.wind, False
        yield "python", self.python, False
        yield "legacy", self.legacy, False

    def step(self, number: int) -> torch.Tensor:
        loss = torch.zeros(1)
        for _ in range(3):
            logits = self.policy(torch.tensor([self.pole.place])) * self.temperature.exp()
            action = int(torch.multinomial(logits.softmax(-1), 1))
            cost = abs(self.pole.step(2 * action - 1 + self.python.gauss(0, 0.1)))
            cost += float(self.legacy.normal(0, 0.01)) + random.random() + numpy.random.rand()
            loss = loss + cost * logits.log_softmax(-1)[action]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


class Annealed(nn.Module):
    """A temperature that each forward lowers, and what it has seen: in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.seen = 1.0, [torch.zeros(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature *= 0.9
        self.seen.append(x.detach().mean(0))
        return x / self.temperature + torch.stack(self.seen).mean(0)


class Thaw(Loop):
    """Freezes and thaws once, lowers a dropout once, leaves a norm in evaluation mode, and keeps
    what lives from step to step in attributes of a module: no ``state_dict()`` has any of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.model = nn.Sequential(
            nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), Annealed(), nn.Linear(2, 1)
        )
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)

    def given(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, number: int) -> torch.Tensor:
        if number == 1:
            self.model[0].requires_grad_(True)
            self.model[2].p = 0.1
        if number == 2:
            self.model[1].eval()
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 3)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


class Adapter(Loop):
    """Trains a small part above a base model that is frozen, and a teacher that follows it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.base = nn.Linear(130, 130).requires_grad_(False)
        self.adapter = nn.Linear(130, 130)
        self.teacher = nn.Linear(130, 130).requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.adapter.parameters(), lr=0.1, momentum=0.5)

    def given(self) -> dict[str, Any]:
        parts = {"base": self.base, "adapter": self.adapter, "teacher": self.teacher}
        return {"model": nn.ModuleDict(parts), "optimizer": self.optimizer}

    def step(self, number: int) -> torch.Tensor:
        batch = torch.randn(4, 130)
        self.optimizer.zero_grad()
        loss = (self.base(batch) + self.adapter(batch) - self.teacher(batch)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.teacher.weight.lerp_(self.adapter.weight.detach(), 0.1)
        return loss


LOOPS = {
    "get_batch": GetBatch, "gan": Gan, "reinforce": Reinforce, "thaw": Thaw, "adapter": Adapter
}  # fmt: skip


def bits(loop: Loop) -> str:
    modules = [one for one in vars(loop).values() if isinstance(one, nn.Module)]
    optimizers = [one for one in vars(loop).values() if isinstance(one, torch.optim.Optimizer)]
    states = [one.state_dict() for one in (*modules, *optimizers)]
    draws = (torch.rand(2).tolist(), random.random(), numpy.random.rand())
    torch.set_printoptions(precision=17)
    return hashlib.sha256(repr((states, draws)).encode()).hexdigest()[:16]


def main() -> None:
    name, folder, stop = sys.argv[1:4]
    torch.set_num_threads(1)
    loop = LOOPS[name](Path(folder))
    with hydroslurm.Run(directory=Path(folder) / "run", every_steps=0, **loop.given()) as run:
        for label, thing, per_rank in loop.more():
            run.register(label, thing, per_rank=per_rank)
        first = run.step
        torch.rand(first + 1)  # what a script draws before its loop does not shift what is in it
        random.random()
        for number in run.steps(STEPS):
            print("at", number, flush=True)
            while stop == "stop" and number == first and not run.stop_requested:
                time.sleep(0.001)
            print("loss", number, loop.step(number).item().hex(), flush=True)
        print("bits", bits(loop), flush=True)


if __name__ == "__main__":
    try:
        main()
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    os._exit(code)  # torch's way out takes a second
