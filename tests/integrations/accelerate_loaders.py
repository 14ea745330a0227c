"""Loops with accelerate over several loaders: ``accelerate_loaders.py "WAY; OPTION, OPTION"``.
Prints each step, in a line that begins with "="."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hydroslurm.errors import UsageError
from hydroslurm.integrations.accelerate import completed_steps, epochs, prepare


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def now_and_then(first: Any, done: Iterator[int], then: Iterator[Any]) -> Iterator[list[Any]]:
    for batch, steps in zip(first, done, strict=False):
        yield [batch, *([next(then)] if steps % 3 == 1 else [])]


def now_and_then_of_two(first: Any, _: Any, *others: Any) -> Iterator[list[Any]]:
    return now_and_then(first, *others)


WAYS: dict[str, Any] = {
    "zip": lambda first, second, *_: zip(first, second, strict=False),
    "zip, the other first": lambda first, second, *_: zip(second, first, strict=False),
    "now and then": now_and_then_of_two,
    "one in the other": lambda first, second, *_: ([one, *second] for one in first),
    "chain": lambda first, second, *_: ([one] for one in itertools.chain(first, second)),
    "epoch by epoch": lambda first, *_: ([one] for one in first),
    # what cannot be kept
    "cycle": lambda first, second, *_: zip(first, itertools.cycle(second), strict=False),
    "twice": lambda first, *_: zip(first, first, strict=False),
    "fetched before": now_and_then_of_two,
    "one behind the other": lambda first, *_: ([one] for one in first),
    # what is not given
    "loader": lambda first, second, *_: zip(first, second, strict=False),
    **dict.fromkeys(("module", "optimizer", "scheduler", "scaler"), now_and_then_of_two),
}


def train(scene: str, how: str) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=3 if "accumulated" in how else 1,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler="seeded" in how),
    )
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    workers = 1 if "workers" in how else 0
    first, second, validation = (
        DataLoader(
            TensorDataset(torch.randn(count, 2)), batch_size=3, shuffle=True, num_workers=workers
        )
        for count in (23, 17, 10)
    )
    things = [model, optimizer, first, second, validation]
    forgotten = {"module": 0, "optimizer": 1, "loader": 3}.get(scene)
    unchecked: dict[str, Any] = {"check": False} if "unchecked" in how else {}
    given = [n for n in range(5) if n != forgotten]
    for n, one in zip(
        given, prepare(accelerator, *(things[n] for n in given), **unchecked), strict=True
    ):
        things[n] = one
    model, optimizer, first, second, validation = things
    if scene == "scheduler":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scene == "scaler")
    then = endless(second)
    if scene == "fetched before":
        next(then)
    counted = completed_steps(accelerator)
    done = iter(lambda: counted, None)
    for epoch in epochs(accelerator, 5):
        model.train()
        leading = second if scene == "epoch by epoch" and epoch % 2 else first
        for batches in WAYS[scene](leading, second, done, then):
            with accelerator.accumulate(model):
                x = torch.cat([one[0] for one in batches])
                loss = model(x + torch.rand_like(x)).square().mean()
                accelerator.backward(scaler.scale(loss))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                counted += 1
                seen = look(model, validation, limit=2) if counted % 2 else 0.0
                print("=", counted, x.sum().item().hex(), loss.item().hex(), seen.hex())
        if scene == "one behind the other":
            for (x,) in second:
                accelerator.backward(model(x).square().mean())
                optimizer.step()
        look(model, validation, limit=100)


def look(model: nn.Module, loader: Iterable[Any], *, limit: int) -> float:
    """What a model in evaluation mode makes of the first batches, as many know it."""
    model.eval()
    total = 0.0
    for number, (x,) in enumerate(loader):
        if number == limit:
            break
        with torch.no_grad():
            total += model(x).mean().item()
    model.train()
    return total


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    try:
        train(*sys.argv[1].partition("; ")[::2])
    except UsageError as error:
        print("=", error)
