"""What hooks keep: in a default, in a partial, in a closure within a closure; in a named tuple."""

from __future__ import annotations

import bisect
import functools
import heapq
import queue
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm


class Bag(NamedTuple):
    rng: np.random.Generator
    sums: dict[str, float]


def best(loss: float, kept: dict[str, float] = {"best": 9.0}) -> float:  # noqa: B006
    kept["best"] = min(kept["best"], loss)
    return kept["best"]


def worst(heap: list[float], loss: float) -> list[float]:
    heapq.heappush(heap, -loss)
    return heap[:3]


def counting() -> Any:
    count, history, waiting = 0, defaultdict(list), queue.Queue()

    def note(loss: float) -> Any:
        def inner() -> None:
            nonlocal count
            count += 1
            bisect.insort(history["sorted"], loss)
            waiting.put(loss)

        inner()
        kinds[loss > 0.5] += 1
        return count, history["sorted"][:3], waiting.qsize()

    kinds = Counter()
    return note


torch.manual_seed(0)
model, bag = torch.nn.Linear(4, 1), Bag(np.random.default_rng(1), {"loss": 0.0})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
hooks = [best, functools.partial(worst, []), counting()]
with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for (x,) in run.batches(epochs=3):
        loss = model(x + float(bag.rng.normal())).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bag.sums["loss"] += loss.item()
        print("=", bag.sums, [hook(loss.item()) for hook in hooks])
