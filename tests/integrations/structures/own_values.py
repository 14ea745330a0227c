"""Values that are replaced: named tuples, a path, a date, fractions, sets and bytes; a memory of
transitions, as those of reinforcement learning."""

from __future__ import annotations

import datetime
import itertools
from collections import deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm


class Transition(NamedTuple):
    state: torch.Tensor
    reward: float


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
memory, best, numbers = deque(maxlen=8), Transition(torch.zeros(4), 9.0), itertools.count()
day, part, price = datetime.date(2020, 1, 1), Fraction(1), Decimal(1)
path, seen, raw = Path("out"), frozenset(), b""
with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for (x,) in run.batches(epochs=3):
        memory.append(Transition(x, float(part)))
        loss = sum(model(one.state).square().mean() * one.reward for one in memory)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        best = min(best, Transition(x[0], loss.item()), key=lambda one: one.reward)
        day, part, price = day + datetime.timedelta(days=1), part * Fraction(2, 3), price / 3
        path, seen, raw = path / f"{run.step}", seen | {run.step}, raw + b"x"
        print(
            "=", repr(loss.item()), best, day, part, price, path, sorted(seen), raw, next(numbers)
        )
