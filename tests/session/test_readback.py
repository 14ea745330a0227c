"""What is loaded is what was saved, in dtype, type and value; where it is not, it is said."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from session.loop import ask_for_stop
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm
from hydroslurm.data import ResumableSampler
from hydroslurm.errors import StateMismatch
from hydroslurm.exitcodes import RUN_AGAIN

# what torch's load_state_dict recasts to bfloat16, makes anew from a generator, or fails at
ODD: dict[str, Any] = {
    "momentum": lambda: torch.full((2,), 1.0001),
    "double": lambda: torch.ones(1, dtype=torch.float64),
    "index": lambda: torch.tensor([2**40 + 1]),
    "history": lambda: [torch.full((1,), 1.0001), {"best": torch.tensor([7])}],
    "window": lambda: deque([1.5, math.nan], maxlen=2),
    "name": lambda: "abc",
    "array": lambda: np.arange(3.0),
    "range": lambda: range(3),
    "ordered": lambda: OrderedDict(a=1),
    "count": lambda: 3,
}


@pytest.fixture(autouse=True)
def _nothing_stays_installed() -> Iterator[None]:
    """A test that fails must not take the next ones with it."""
    yield
    if hydroslurm.is_installed():
        hydroslurm.uninstall()


class Own(torch.optim.SGD):
    """An optimizer of a user's own, with state of every kind."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                for name, make in ODD.items():
                    self.state[param].setdefault(name, make())


class Looking(Own):
    """One that does something of its own when it is loaded, and leaves the rest to torch."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.was_loaded = True


class Expanded(nn.Module):
    """A layer, and a buffer that shows one value in many places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("scale", torch.full((1, 1), math.nan).expand(4, 2))

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def run_of(directory: Path, **options: Any) -> hydroslurm.Run:
    return hydroslurm.Run(directory=directory, every_steps=0, **options)


def saved(run: hydroslurm.Run, model: nn.Module, optimizer: Any) -> None:
    """One step, and a save behind it; the process ends."""
    run.resume()
    x = torch.rand(4, 3, dtype=next(model.parameters()).dtype)
    model(x).float().square().sum().backward()
    optimizer.step()
    run.step += 1
    run.save()
    run.close()


def resumed(run: hydroslurm.Run) -> None:
    assert run.resume()
    run.close()


def same(one: Any, other: Any) -> bool:
    """In types, dtypes and values, NaN too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, deque)):
        limits = getattr(one, "maxlen", None), getattr(other, "maxlen", None)
        return limits[0] == limits[1] and all(map(same, one, other)) and len(one) == len(other)
    return bool(one == other) or one != one  # noqa: PLR0124 - NaN


def test_the_state_of_an_optimizer_comes_back_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of bfloat16 weights, as float32, float64 and whole numbers, and in any container; also where
    torch's own load_state_dict fails."""
    odd = {name: make() for name, make in ODD.items()}
    for kind in (Own, Looking):
        for life in (1, 2):
            if kind is Looking and life == 1:
                for name in ("array", "range"):  # torch fails before it could be put right
                    ODD.pop(name), odd.pop(name)
            torch.manual_seed(0)
            model = nn.Linear(3, 2).bfloat16()
            optimizer = kind(model.parameters(), lr=0.1)
            run = run_of(tmp_path / kind.__name__, model=model, optimizer=optimizer)
            if life == 1:
                saved(run, model, optimizer)
            else:
                resumed(run)
        assert same({k: v for k, v in optimizer.state[model.weight].items() if k in odd}, odd)
    assert optimizer.was_loaded  # type: ignore[attr-defined]
    assert "is not what it was" not in caplog.text
