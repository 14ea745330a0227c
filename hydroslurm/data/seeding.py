"""Random augmentation that depends on the sample and the epoch, and on nothing else.

A DataLoader seeds each worker once; which numbers a sample gets then depends on the number of
workers, on what the worker did before, and on where a run was resumed (workers start anew there).
Here the global generators are seeded around each ``__getitem__`` instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from hydroslurm.checkpoint import rng
from hydroslurm.errors import UsageError


def derive(*parts: object) -> bytes:
    """Thirty-two bytes that are a fixed function of ints and strings, on every machine."""
    text = "hydroslurm|" + "|".join(str(part) for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


class SeededDataset(Dataset[Any]):
    """A map-style data set whose ``__getitem__`` draws the same numbers for the same sample.

    ``random``, ``numpy.random`` and torch's CPU generator are seeded from (seed, epoch, index)
    around each call, and put back after it; generators that the data set holds itself are not
    touched. What comes out is then the same for any number of workers, any prefetching, and
    wherever a run was resumed.

    The epoch is that of the index, where the index comes from a :class:`ResumableSampler`. A
    plain index gets the epoch of :meth:`set_epoch`, which ``position_of(loader)`` calls, and 0
    when nobody does: each epoch would then augment alike.

    A data set with ``__getitems__`` is called once for a batch, seeded from all indexes of the
    batch; its numbers then depend on the composition of the batch too. Costs about a tenth
    of a millisecond a call.
    """

    def __init__(self, dataset: Any, *, seed: int = 0) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise UsageError(
                f"SeededDataset wants a data set with __getitem__, not {type(dataset).__name__}: "
                "an iterable one has no index to seed from; seed in its __iter__"
            )
        self.dataset = dataset
        self.seed = seed
        # shared memory, because persistent workers hold a copy of this object for all epochs
        self._epoch = torch.zeros((), dtype=torch.int64)

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch for indexes that do not know theirs; workers see it too."""
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        with self._seeded(index):
            return self.dataset[index]

    def __getitems__(self, indexes: Sequence[Any]) -> Any:
        bulk = getattr(self.dataset, "__getitems__", None)
        if not callable(bulk):
            return [self[index] for index in indexes]
        with self._seeded(indexes):
            return bulk(indexes)

    def _seeded(self, index: Any) -> contextlib.AbstractContextManager[None]:
        several = index if isinstance(index, (list, tuple)) else (index,)
        known = getattr(several[0], "epoch", None) if several else None
        epoch = int(self._epoch.item()) if known is None else known
        digest = derive("sample", self.seed, epoch, *map(_name, several))
        return rng.seeded(digest, devices=False)


def _name(index: Any) -> int | str:
    try:
        return operator.index(index)
    except TypeError:  # a key of another kind, from a sampler of the user's own
        return repr(index)
