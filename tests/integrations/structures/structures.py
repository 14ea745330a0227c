"""What people put around their data: state that lives in a data set, a sampler, a collator."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

ROWS = torch.arange(24 * 4, dtype=torch.float32).reshape(24, 4) / 50 - 1
STRUCTURE = sys.argv[1]
WORKERS: dict[str, Any] = {"num_workers": 2} if "workers" in sys.argv[2:] else {}
if "persistent" in sys.argv[2:]:
    WORKERS = {"num_workers": 2, "persistent_workers": True}


class Rows(Dataset):
    def __init__(self, transform: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return ROWS[index] if self.transform is None else self.transform(ROWS[index])


class Jitter:
    """A transform with a generator of NumPy's."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        return row + float(self.rng.normal()) * 0.1


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda made, one: one(made), self.transforms, row)


class Warmup:
    """A transform that counts its calls."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return row * min(1.0, self.calls / 60)


class Curriculum(Dataset):
    """Harder from time to time: the loop sets the level."""

    def __init__(self) -> None:
        self.level = 1

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return ROWS[index] * self.level


class Shuffled(IterableDataset):
    """A stream through a buffer, with a generator of its own, in an order by how often it was gone
    through."""

    def __init__(self) -> None:
        self.rng, self.passes = random.Random(3), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        order = torch.from_numpy(np.random.RandomState(self.passes).permutation(len(ROWS)))
        info = get_worker_info()
        step, first = (1, 0) if info is None else (info.num_workers, info.id)
        buffer: list[torch.Tensor] = []
        for row in itertools.islice(ROWS[order], first, None, step):
            buffer.append(row)
            if len(buffer) == 6:
                yield buffer.pop(self.rng.randrange(6))
        self.rng.shuffle(buffer)
        yield from buffer


def masking_closure() -> Callable[[list[Any]], torch.Tensor]:
    drawn, rng = {"batches": 0}, random.Random(4)

    def collate(rows: list[Any]) -> torch.Tensor:
        drawn["batches"] += 1
        return default_collate(rows) * (1 + rng.random() / drawn["batches"])

    return collate


class Buckets(Sampler[list[int]]):
    """Batches in an order of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(9)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(range(first, first + 4)) for first in range(0, len(ROWS), 4)]
        self.rng.shuffle(batches)
        yield from batches


def dataset() -> Any:
    made: dict[str, Callable[[], Any]] = {
        "transforms": lambda: Subset(
            ConcatDataset([Rows(Compose(Warmup(), Jitter())), Rows(Jitter())]), range(2, 26)
        ),
        "curriculum": Curriculum,
        "stream": Shuffled,
    }
    return made.get(STRUCTURE, Rows)()


def collator() -> Callable[[list[Any]], Any]:
    return masking_closure() if STRUCTURE == "collator" else default_collate


def loading(data: Any) -> dict[str, Any]:
    """The arguments of a DataLoader."""
    order: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    if STRUCTURE == "stream":
        order = {"batch_size": 4}
    if STRUCTURE == "weights":
        order = {"batch_size": 4, "sampler": WeightedRandomSampler(torch.ones(24), 24)}
    if STRUCTURE == "buckets":
        order = {"batch_sampler": Buckets()}
    return {**order, "collate_fn": collator(), **WORKERS}


def after_step(loader: Any, step: int, loss: float) -> None:
    """What a loop changes as it goes."""
    if STRUCTURE == "curriculum" and step % 4 == 0:
        loader.dataset.level += 1
    if STRUCTURE == "weights":
        loader.sampler.weights[step % 24] += abs(loss) + 1
