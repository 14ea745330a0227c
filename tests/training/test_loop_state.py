"""What lives in the objects and variables of an own loop from one step to the next: each loop as
its writer has it, stopped in several steps, goes on as if it had been left alone."""

from __future__ import annotations

import copy
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from training.loop import Pole, ask_for_stop

import hydroslurm

EPOCHS, STEPS = 3, 9
pytestmark = pytest.mark.filterwarnings("ignore:resuming inside an epoch")


class Stopper:
    """Says what a loop computes, and asks for a stop behind some steps."""

    def __init__(self, folder: Path, stops: set[int]) -> None:
        self.folder, self.stops, self.said = folder, stops, []
        self.run: Any = None

    def __call__(self, *values: Any) -> None:
        shown = [one.tolist() if isinstance(one, torch.Tensor) else one for one in values]
        self.said.append((self.run.step, *shown))
        if self.run.step + 1 in self.stops:
            ask_for_stop(self.run)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


class Parts:
    def __init__(
        self,
        say: Stopper,
        loader: DataLoader | None = None,
        model: nn.Module | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    ) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.model = model or nn.Linear(2, 1)
        self.optimizer = optimizer(self.model)
        data = TensorDataset(torch.randn(6, 2))
        self.loader = loader or DataLoader(data, batch_size=2, shuffle=True)
        self.run = say.run = hydroslurm.Run(
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            directory=say.folder,
            every_steps=0,
        )

    def learn(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


# --- loops that go on by themselves
# ------------------------------------------------------------------------------------------------


def counters(say: Stopper) -> None:
    """A best loss, patience, a running mean, a loss of the step before, a history, a count."""
    parts = Parts(say)
    best, patience, mean, last = float("inf"), 0, None, torch.zeros(())
    history, numbers = defaultdict[str, list[float]](list), itertools.count()
    for (x,) in parts.run.batches(epochs=EPOCHS):
        loss = parts.learn(x)
        if loss < best:
            best, patience = float(loss), 0
        else:
            patience += 1
        mean = loss if mean is None else 0.9 * mean + 0.1 * loss
        history["best"].append(best)
        say(best, patience, mean, last, sum(history["best"]), next(numbers))
        last = loss
    say(best, patience, mean)


def one_epoch(parts: Parts, say: Stopper, scale: float) -> float:
    total, count = 0.0, 0
    for (x,) in parts.run.batches(epochs=parts.run.epoch + 1):
        total += float(parts.learn(x * scale))
        count += 1
        say(total, count)
    return total / count


def early_stopping(say: Stopper) -> None:
    """The loop is in a function; who calls it keeps the best epoch and its weights."""
    parts = Parts(say)
    best, patience, scale, weights, history = float("inf"), 0, 1.0, None, []
    for _ in range(parts.run.epoch, EPOCHS):
        loss = one_epoch(parts, say, scale)
        history.append(loss)
        if loss < best:
            best, patience, weights = loss, 0, copy.deepcopy(parts.model.state_dict())
        else:
            patience, scale = patience + 1, scale * 0.5
    say(best, patience, scale, history, weights["weight"])


def generators(say: Stopper) -> None:
    """Of every kind, in a variable, a list, an object and a closure."""
    parts, noise, rolls = Parts(say), torch.Generator().manual_seed(1), [np.random.default_rng(1)]
    agent, python = Parts.__new__(Parts), random.Random(3)
    agent.wind = np.random.RandomState(2)

    def draw() -> float:
        return python.random() + agent.wind.rand()

    for _ in parts.run.steps(STEPS):
        x = torch.randn(4, 2, generator=noise) + rolls[0].random() + draw()
        say(parts.learn(x))


def first_set_in_a_step(say: Stopper) -> None:
    """A variable that is not there before the first step has set it."""
    parts = Parts(say)
    for step in parts.run.steps(STEPS):
        loss = parts.learn(torch.randn(4, 2))
        trend = 0.5 * trend + loss if step > 0 else loss  # noqa: F821
        say(trend)


def wrapped(run: Any) -> Iterator[Any]:
    """Batches pass through a generator of the script's own, which counts."""
    seen = 0
    for (x,) in run.batches(epochs=EPOCHS):
        seen += len(x)
        yield seen * x


def through_a_generator(say: Stopper) -> None:
    parts, total = Parts(say), 0.0
    for x in wrapped(parts.run):
        total += float(parts.learn(x))
        say(total)


CURRICULUM = {"level": 1}
SEEN = 0


def harder() -> None:
    global SEEN
    SEEN += 1
    CURRICULUM["level"] = 1 + SEEN // 2


def globals_of_the_module(say: Stopper) -> None:
    global SEEN
    SEEN, CURRICULUM["level"] = 0, 1
    parts = Parts(say)
    for (x,) in parts.run.batches(epochs=EPOCHS):
        harder()
        say(parts.learn(x * CURRICULUM["level"]), SEEN)


def two_loops(say: Stopper) -> None:
    """One behind the other, with what lies between them."""
    parts, total, count = Parts(say), 0.0, 0
    for end in (4, STEPS):
        for _ in parts.run.steps(end):
            total += float(parts.learn(torch.randn(4, 2)))
            count += 1
            say(total, count)
        total = round(total, 3) + float(torch.rand(1))


class Noisy:
    """Samples with noise of their own, which a curriculum makes stronger."""

    def __init__(self) -> None:
        self.rng, self.level, self.seen = random.Random(1), 1.0, 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen += 1
        return torch.tensor([index, self.level * self.rng.random()])


def what_hangs_in_the_loader(say: Stopper) -> None:
    """A data set, a collate function and a sampler that change on their way."""
    data, drawn, sampler = Noisy(), np.random.default_rng(2), WeightedRandomSampler([1.0] * 6, 6)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + float(drawn.random())

    loader = DataLoader(data, batch_size=2, sampler=sampler, collate_fn=collate)
    parts = Parts(say, loader)
    for x in parts.run.batches(epochs=EPOCHS):
        loss = parts.learn(x)
        data.level = 1 + float(loss)
        sampler.weights[int(x[0, 0]) % 6] += 0.5
        say(loss, data.seen, sampler.weights)


def registered(say: Stopper) -> None:
    """A second model with its optimizer and scheduler, an environment, and its generator."""
    parts, critic, pole = Parts(say), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), Pole()
    sgd = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.7)
    given = {"critic": critic, "sgd": sgd, "scheduler": scheduler, "wind": pole.wind}
    for name, one in given.items():
        parts.run.register(name, one)
    parts.run.register("pole", pole, per_rank=True)
    for _ in parts.run.steps(STEPS):
        x = torch.randn(4, 2) + pole.step(random.random())
        sgd.zero_grad()
        loss = critic(x).square().mean()
        loss.backward()
        sgd.step()
        scheduler.step()
        say(parts.learn(x), loss, sgd.param_groups[0]["lr"], pole.place)


class Annealed(nn.Module):
    """A temperature that each forward lowers, and what it has seen: in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.seen = 1.0, [torch.zeros(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature *= 0.9
        self.seen.append(x.detach().mean(0))
        return x / self.temperature + torch.stack(self.seen).mean(0)


def thawed(say: Stopper) -> None:
    """Freezes and thaws once, lowers a dropout once, leaves a norm in evaluation mode."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), Annealed(), nn.Linear(2, 1)
    )
    model[0].requires_grad_(False)
    parts = Parts(say, model=model)
    for step in parts.run.steps(STEPS):
        if step == 1:
            model[0].requires_grad_(True)
            model[2].p = 0.1
        if step == 2:
            model[1].eval()
        say(parts.learn(torch.randn(4, 2)), model[0].weight)


def closures_of_lbfgs(say: Stopper) -> None:
    """And a model that is pruned on the way."""
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    prune.l1_unstructured(model, "weight", amount=1)
    parts = Parts(say, None, model, lambda of: torch.optim.LBFGS(of.parameters(), 0.1, max_iter=3))
    for (x,) in parts.run.batches(epochs=EPOCHS):

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            parts.optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        say(parts.optimizer.step(closure))
        if parts.run.step == 5:
            prune.l1_unstructured(model, "weight", amount=1)


def gradients_of_several_batches(say: Stopper) -> None:
    """Added up by the loop itself, over the ends of epochs."""
    parts = Parts(say)
    for number, (x,) in enumerate(parts.run.batches(epochs=EPOCHS), parts.run.step):
        loss = parts.model(x).square().mean()
        loss.backward()
        if number % 4 == 2:
            parts.optimizer.step()
            parts.optimizer.zero_grad()
        say(loss.detach())


LOOPS: list[Callable[[Stopper], None]] = [
    counters, early_stopping, generators, first_set_in_a_step, through_a_generator,
    globals_of_the_module, two_loops, what_hangs_in_the_loader, registered, thawed,
    closures_of_lbfgs, gradients_of_several_batches,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda one: one.__name__)
def test_goes_on(loop: Callable[[Stopper], None], tmp_path: Path) -> None:
    """Stopped inside the first epoch, at its end, and inside a later one."""
    alone = Stopper(tmp_path / "alone", set())
    loop(alone)
    alone.run.close()
    for stop in (1, 3, 4, 7, None):
        attempt = Stopper(tmp_path / "run", {stop} if stop else set())
        if stop:
            with pytest.raises(SystemExit):
                loop(attempt)
            hydroslurm.uninstall()
        else:
            loop(attempt)
            attempt.run.close()
    assert attempt.said == alone.said  # a list in an object in a variable: of all attempts
