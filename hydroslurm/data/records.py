"""Train from FFRecord files: a data set over one or several of them, and a loader that is told a
step to begin at."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy
from torch.utils.data import DataLoader, Dataset

from hydroslurm.data.record_files import RecordFile, RecordWriter
from hydroslurm.data.sampler import ResumableSampler
from hydroslurm.errors import UsageError

__all__ = ["RecordDataset", "RecordFile", "RecordLoader", "RecordWriter"]


class RecordDataset(Dataset[Any]):
    """The samples of several FFRecord files, one after the other.

    A subclass says in :meth:`process` what a sample's bytes are. Any DataLoader reads a batch in
    one pass through the files, because torch asks for all of it at once (``__getitems__``).

    Args:
        paths: a file, several in their order, or a folder: all ``*.ffr`` in it, in the order of
            their names.
        verify: as for :class:`~hydroslurm.data.record_files.RecordFile`.

    Raises:
        UsageError: there is no file.
        OSError, RecordError: as for :class:`~hydroslurm.data.record_files.RecordFile`.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        verify: bool = True,
    ) -> None:
        self.files = [RecordFile(path, verify=verify) for path in _listed(paths)]
        self._ends = numpy.cumsum([len(file) for file in self.files])

    def process(
        self,
        indices: Sequence[SupportsIndex],  # noqa: ARG002 - for subclasses
        records: list[bytes],
    ) -> list[Any]:
        """Decode a batch, and return one sample for each record; ``collate_fn`` gets them.

        Unpickling a file runs what its author has put there: do it with files of your own only.
        """
        return records

    def read_batch(self, indices: Sequence[SupportsIndex]) -> list[bytes]:
        """The bytes of these samples, in this order, each file read in one pass; see
        :meth:`RecordFile.read_batch() <hydroslurm.data.record_files.RecordFile.read_batch>`."""
        numbers = numpy.array([self._number(index) for index in indices], numpy.int64)
        places = numpy.searchsorted(self._ends, numbers, side="right")
        records = [b""] * len(numbers)
        for place in numpy.unique(places).tolist():
            file = self.files[place]
            mine = numpy.flatnonzero(places == place).tolist()
            before = int(self._ends[place]) - len(file)
            read = file.read_batch([int(numbers[n]) - before for n in mine])
            for n, record in zip(mine, read, strict=True):
                records[n] = record
        return records

    def close(self) -> None:
        """Close all files; any number of times."""
        for file in self.files:
            file.close()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        """One sample, or a list of them for a list of numbers, as FFRecord's data sets have it."""
        if isinstance(index, (list, tuple)):
            return self.__getitems__(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        samples = self.process(indices, self.read_batch(indices))
        if len(samples) != len(indices):
            raise UsageError(
                f"{type(self).__name__}.process() returned {len(samples)} samples for "
                f"{len(indices)} records; return a list with one for each"
            )
        return samples

    def _number(self, index: SupportsIndex) -> int:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"there is no sample {number} among {len(self)} of {_named(self)}")
        return number % len(self)


class RecordLoader(DataLoader[Any]):
    """torch's DataLoader with an order that can be taken up at any step, by any number of ranks.

    ``Run(loader=...)`` resumes it at once and by itself. A loop of one's own names the epoch before
    each (``loader.sampler.set_epoch(epoch)``: without it every epoch has the same order), and then
    where to begin, with :meth:`set_step`.

    Args:
        dataset: any map-style data set; a :class:`RecordDataset` is read by batches.
        batch_size: samples of this rank.
        shuffle, seed: of the order, see :class:`~hydroslurm.data.sampler.ResumableSampler`.
        sampler: another order; with ``skippable`` it is a ResumableSampler.
        drop_last: leave out what makes no whole batch of all ranks.
        skippable: ``False`` refuses :meth:`set_step`: for frameworks that keep the place in the
            data themselves, and for other samplers.
        options: of DataLoader.

    Raises:
        UsageError: ``skippable`` with another sampler or with batches that cannot be counted.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        drop_last: bool = False,
        skippable: bool = True,
        **options: Any,
    ) -> None:
        if sampler is None and batch_sampler is None:
            sampler = ResumableSampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last)
        elif shuffle:
            raise UsageError("shuffle=True and a sampler: the sampler has the order, drop one")
        if skippable and (batch_sampler is not None or not isinstance(sampler, ResumableSampler)):
            raise UsageError(
                f"skippable=True counts the samples of a ResumableSampler, not of a "
                f"{type(batch_sampler or sampler).__name__}; leave the sampler out, or pass "
                "skippable=False"
            )
        self.seed = seed
        self.skippable = skippable
        super().__init__(
            dataset,
            batch_size,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            drop_last=drop_last,
            **options,
        )

    def set_step(self, step: int) -> None:
        """Begin this epoch after so many batches; the ones after it are whole.

        Nothing is read for the batches before. All ranks call it with the same step. After a change
        of their number a step means the same samples if batch size x ranks is what it was.
        ``len(loader)`` stays that of a whole epoch.

        Raises:
            UsageError: not ``skippable``, or a step outside of 0..len(loader).
        """
        if not self.skippable:
            raise UsageError("this loader was made with skippable=False, and has no set_step()")
        if not 0 <= step <= len(self):
            raise UsageError(f"a step in 0..{len(self)} is wanted, not {step}")
        sampler: Any = self.sampler
        consumed = step * (self.batch_size or 1) * sampler.world_size
        sampler.load_state_dict(sampler.state_at(sampler.epoch, consumed))


def _listed(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[str | os.PathLike[str]]:
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not listed:
        raise UsageError(
            "an FFRecord file, a list of them or a folder is wanted, not an empty list"
        )
    if len(listed) == 1 and (folder := Path(listed[0])).is_dir():
        found = sorted(folder.glob("*.ffr"))
        if not found:
            raise UsageError(f"there is no *.ffr in the folder {folder}")
        return [*found]
    return listed


def _named(dataset: RecordDataset) -> str:
    first, more = dataset.files[0].path, len(dataset.files) - 1
    return f"{first} and {more} more files" if more else str(first)
