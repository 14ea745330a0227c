"""Batches of one size for all ranks together, however many ranks there are.

``batch_size`` of a DataLoader is each rank's own, so that with fewer ranks the step becomes smaller
and the training another one. Here the samples of a step are the next ``batch_size`` of the epoch's
one order, and the ranks share them: rank r of w takes the r-th of them, the (r+w)-th and so on,
which is one sample more for some ranks than for others. The steps of an epoch are the same for
every number of ranks, and so are the samples of each: the position is the count of samples.

The ranks' gradients count by their samples: see :meth:`GlobalBatchSampler.share`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils.data import BatchSampler, Sampler

from hydroslurm.checkpoint import rng
from hydroslurm.data.sampler import ResumableSampler, SampleIndex, Share
from hydroslurm.data.seeding import derive
from hydroslurm.errors import UsageError


@dataclass(frozen=True)
class Shard:
    """One of the fixed parts of a step's samples.

    Attributes:
        number: of the shard, from 0. samples: how many it has.
        batch: as the loader made it.
    """

    number: int
    samples: int
    batch: Any


@dataclass
class StepShards:
    """This rank's shards of one step; none where the step has fewer samples than there are ranks.

    Attributes:
        epoch, consumed: where the step begins: so many samples of the epoch are used.
        samples, count: of the whole step: its samples and its shards.
        passes: how often the shards were gone through.
    """

    epoch: int
    consumed: int
    samples: int
    count: int
    shards: list[Shard]
    passes: int = 0

    def __iter__(self) -> NoReturn:
        raise UsageError(
            "a batch of a run with `summation: fixed_order` has several shards, each with a "
            "forward and a backward of its own. Write `for x, y in run.shards(batch): loss = ...; "
            "loss.backward()`, and the optimizer's step behind that loop; other runs take it too"
        )

    def __getitem__(self, _: object) -> NoReturn:
        self.__iter__()


class GlobalBatchSampler(Sampler[list[int]]):
    """A ``batch_sampler`` for a DataLoader: this rank's part of each step's samples.

        sampler = ResumableSampler(data, seed=1)
        loader = DataLoader(data, batch_sampler=GlobalBatchSampler(sampler, batch_size=256))

    Where the last samples of an epoch are fewer than the ranks, a rank without any gets the first
    of them again, so that it takes part in the step; it counts for nothing.

    Args:
        sampler: the order, and whose share this is.
        batch_size: samples of a step, of all ranks together.
        drop_last: leave out the last samples of an epoch, if they are no whole batch.
        shards: divide each step into so many parts, however many ranks there are: the s-th of n
            has the s-th sample, the (s+n)-th and so on. Rank r of w has the parts r, r+w and so
            on, each as a batch of its own; :meth:`steps` puts those of one step together.

    Raises:
        UsageError: it is no such sampler, or no such size.
    """

    def __init__(
        self,
        sampler: ResumableSampler,
        *,
        batch_size: int,
        drop_last: bool = False,
        shards: int | None = None,
    ) -> None:
        if not isinstance(sampler, ResumableSampler):
            raise UsageError(
                f"GlobalBatchSampler({type(sampler).__name__}): wanted a "
                "hydroslurm.data.ResumableSampler, whose order all ranks know"
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UsageError(f"batch_size={batch_size!r}: wanted 1 or more, of all ranks together")
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.shards = shards

    def share(self, consumed: int) -> tuple[int, int]:
        """Of the step that begins once so many samples of the epoch are used: how many samples
        are this rank's, and how many there are in all."""
        total = max(0, min(self.batch_size, self.sampler.length - consumed))
        share = self.sampler.share
        mine = self._parts(consumed, consumed + total, share)
        return sum(len(one) for one in mine), total

    def steps(self, batches: Iterator[Any], *, epoch: int, consumed: int) -> Iterator[StepShards]:
        """Put the batches of a loader together as steps, where there are ``shards``.

        What a data set draws at random in this process depends on the shard, and not on the rank:
        the generators are seeded around each batch. (Workers are processes with generators of
        their own: see :class:`~hydroslurm.data.SeededDataset`.)
        """
        assert self.shards is not None
        share = self.sampler.share
        for begin, end in self._bounds(consumed):
            shards = []
            for positions in self._parts(begin, end, share):
                with rng.seeded(shard_key("data", epoch, begin, positions.start - begin)):
                    batch = next(batches)
                shards.append(Shard(positions.start - begin, len(positions), batch))
            count = min(self.shards, end - begin)
            yield StepShards(epoch, begin, end - begin, count, shards)
        next(batches, None)  # so that the loader's iterator sees its end, and ends its workers

    def _bounds(self, consumed: int) -> Iterator[tuple[int, int]]:
        """The steps that are left: their first position, and the one behind their last."""
        length = self.sampler.length
        for begin in range(consumed, length, self.batch_size):
            end = min(begin + self.batch_size, length)
            if not self.drop_last or end - begin == self.batch_size:
                yield begin, end

    def _parts(self, begin: int, end: int, share: Share) -> list[range]:
        """The positions of this rank in one step, a range for each of its batches."""
        if self.shards is None:
            mine = range(begin + share.rank, end, share.world_size)
            return [mine] if mine else []
        numbers = range(share.rank, min(self.shards, end - begin), share.world_size)
        return [range(begin + number, end, self.shards) for number in numbers]

    def __len__(self) -> int:
        """The steps of a whole epoch."""
        whole, rest = divmod(self.sampler.length, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        share, epoch = self.sampler.share, self.sampler.epoch
        order, consumed = self.sampler.begin_pass()
        for begin, end in self._bounds(consumed):
            parts = self._parts(begin, end, share)
            if not parts and self.shards is None:
                parts = [range(begin, begin + 1)]
            for positions in parts:
                yield [
                    SampleIndex(one if order is None else int(order[one]), epoch, one)
                    for one in positions
                ]
        self.sampler.end_pass(epoch)


def shard_key(use: str, epoch: int, consumed: int, *more: int) -> bytes:
    """What random numbers of one shard are seeded with: the same for every number of ranks, and
    another one for another seed of the script (``torch.manual_seed``)."""
    return derive(use, torch.initial_seed(), epoch, consumed, *more)


def share_batches(loader: Any, *, ranks: int, batch: str, in_shards: bool = False) -> None:
    """Make a DataLoader one of an elastic run.

    Args:
        ranks: of the run at its full size.
        batch: ``keep_global`` has its batches be those of so many ranks together, whatever their
            number is; ``per_rank`` leaves them as they are.
        in_shards: each step is divided into as many parts as there are ranks at the full size, of
            ``batch_size`` samples each.

    Its ``batch_sampler`` is replaced, which torch allows nobody to do once the loader is made, for
    workers might have the old one: so it has to be done before the loader is iterated.

    Raises:
        UsageError: it is no plain DataLoader over a ResumableSampler.
    """
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(batches, GlobalBatchSampler):
        return
    sampler = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler or not isinstance(sampler, ResumableSampler):
        raise UsageError(
            "an elastic run shares each batch out anew when its size changes, and needs a plain "
            "DataLoader whose order it knows: DataLoader(data, batch_size=..., "
            "sampler=hydroslurm.data.ResumableSampler(data)) instead of shuffle=True. This one is "
            f"a {type(loader).__name__} over {type(sampler or batches).__name__}"
        )
    if batch == "per_rank":
        return
    shared = GlobalBatchSampler(
        sampler,
        batch_size=batches.batch_size * ranks,
        drop_last=batches.drop_last,
        shards=ranks if in_shards else None,
    )
    vars(loader)["batch_sampler"] = shared
