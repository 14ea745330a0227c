"""What other samplers leave of an epoch to another number of ranks.

torch's DistributedSampler and accelerate's BatchSamplerShard share one order out, batch by batch:
once each of w ranks has used b batches of n samples, the first b·w·n of that order are used, and
the rest can be shared out among any number of ranks. So a script that knows nothing of it may be
stopped with three ranks and go on with two, inside an epoch.

The order is asked of the sampler itself, for a single rank; nothing of its arithmetic is repeated
here. Only these two classes, over a plain BatchSampler, are known to work so: a subclass, or a
sampler of somebody's own, is not taken up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hydroslurm.data.sampler import Share, places

_SAMPLERS = ("torch.utils.data", "accelerate.data_loader")
"""Packages whose samplers draw from a generator that a position puts back, or from a seed."""

_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
    *("multiprocessing_context", "prefetch_factor", "pin_memory_device", "in_order"),
)


@dataclass(frozen=True)
class SharedOrder:
    """How the ranks share the samples of an epoch.

    Attributes:
        name: of the order: one of another name is another one.
        batch_size: of one rank.
        drop_uneven: the last samples, which the ranks cannot share evenly, are left out; else the
            first ones are repeated.
        drop_last: a batch that is not full is left out.
        indexes: makes the whole epoch's order, for the epoch that was announced last, from the
            generators as they are. It may draw from them.
        most_ranks: more would not share it: each would go through all of it.
    """

    name: str
    batch_size: int
    drop_uneven: bool
    drop_last: bool
    indexes: Callable[[], list[int]]
    most_ranks: int = 1 << 30

    def batches_left(self, consumed: int, length: int, share: Share) -> int:
        """Of each rank, once so many samples of the epoch are used."""
        each = len(places(consumed, length, share, drop_last=self.drop_uneven))
        return each // self.batch_size if self.drop_last else -(-each // self.batch_size)

    def rest(self, consumed: int, share: Share) -> list[list[int]]:
        """The batches of one rank behind the first samples of the order; all ranks have equally
        many."""
        whole = self.indexes()
        left = places(consumed, len(whole), share, drop_last=self.drop_uneven)
        mine = [whole[place % len(whole)] for place in left]
        return list(BatchSampler(mine, self.batch_size, self.drop_last))


def shared_order(loader: Any) -> SharedOrder | None:
    """How ranks share this loader's samples; None if it is not known."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    batches: Any = loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    if type(batches) is BatchSampler and type(sampler) is DistributedSampler:
        name = f"DistributedSampler(shuffle={sampler.shuffle}, seed={sampler.seed})"
        drops = (sampler.drop_last, batches.drop_last)
        return SharedOrder(name, batches.batch_size, *drops, lambda: _whole(sampler))
    # accelerate's, by its name: it need not be installed. For one rank it makes none
    is_shard = type(batches).__name__ == "BatchSamplerShard" and not batches.split_batches
    inner: Any = batches.batch_sampler if is_shard else batches
    if type(inner) is not BatchSampler or not _gives_each_once(inner.sampler, loader.dataset):
        return None
    if is_shard and not (batches.even_batches or inner.drop_last):
        return None
    name, drops = type(inner.sampler).__name__, (inner.drop_last, inner.drop_last)
    order = SharedOrder(name, inner.batch_size, *drops, lambda: list(inner.sampler))
    return order if is_shard else replace(order, most_ranks=1)


def _whole(sampler: DistributedSampler[Any]) -> list[int]:
    """The order that all ranks share."""
    alone = copy.copy(sampler)
    alone.num_replicas, alone.rank, alone.drop_last = 1, 0, False
    alone.num_samples = alone.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    return list(alone)


def _gives_each_once(sampler: Any, data: Any) -> bool:
    """Of torch's, and accelerate's subclass, those that go through the whole data set."""
    is_known = type(sampler).__module__.startswith(_SAMPLERS) and isinstance(
        sampler, (RandomSampler, SequentialSampler)
    )
    return is_known and not getattr(sampler, "replacement", False) and len(sampler) == len(data)


def loader_of(loader: Any, batches: list[list[int]]) -> DataLoader[Any]:
    """A loader as this one, for exactly these batches."""
    # in_order is newer than the oldest torch
    options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    return DataLoader(loader.dataset, batch_sampler=batches, **options)
