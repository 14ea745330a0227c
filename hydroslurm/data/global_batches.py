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
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from hydroslurm.data.sampler import ResumableSampler, SampleIndex
from hydroslurm.errors import UsageError


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

    Raises:
        UsageError: it is no such sampler, or no such size.
    """

    def __init__(
        self, sampler: ResumableSampler, *, batch_size: int, drop_last: bool = False
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

    def share(self, consumed: int) -> tuple[int, int]:
        """Of the step that begins once so many samples of the epoch are used: how many samples
        are this rank's, and how many there are in all."""
        total = max(0, min(self.batch_size, self.sampler.length - consumed))
        rank, world_size = self.sampler.rank, self.sampler.world_size
        return len(range(rank, total, world_size)), total

    def __len__(self) -> int:
        """The steps of a whole epoch."""
        whole, rest = divmod(self.sampler.length, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        share, epoch = self.sampler.share, self.sampler.epoch
        order, consumed = self.sampler.begin_pass()
        length = self.sampler.length
        while consumed < length:
            end = min(consumed + self.batch_size, length)
            if self.drop_last and end - consumed < self.batch_size:
                break
            positions = range(consumed + share.rank, end, share.world_size) or range(
                consumed, consumed + 1
            )
            yield [
                SampleIndex(one if order is None else int(order[one]), epoch, one)
                for one in positions
            ]
            consumed = end
        self.sampler.end_pass(epoch)


def share_batches(loader: Any, *, ranks: int, batch: str) -> None:
    """Make a DataLoader one of an elastic run.

    Args:
        ranks: of the run at its full size.
        batch: ``keep_global`` has its batches be those of so many ranks together, whatever their
            number is; ``per_rank`` leaves them as they are.

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
        sampler, batch_size=batches.batch_size * ranks, drop_last=batches.drop_last
    )
    vars(loader)["batch_sampler"] = shared
