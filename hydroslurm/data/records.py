"""FFRecord files: many samples in one file, each read by its number; a data set over one or several
of them, and a loader that is told a step to begin at.

All numbers are little-endian, and nothing is aligned:

====================  ==========  =================================================================
at byte               type        what
====================  ==========  =================================================================
0                     uint32      CRC-32 of bytes 4 to 12 + 12n; 0: not computed (old files)
4                     int64       n, the number of samples
12                    uint32[n]   CRC-32 of each sample
12 + 4n               int64[n]    where each sample begins, in bytes from the start of the file
12 + 12n              bytes       the samples; each ends where the next begins, the last one where
                                  the file ends
====================  ==========  =================================================================

CRC-32 is zlib's. A file that was cut off inside its last sample has nothing in its header that says
so: only that sample's CRC does. (Source: HFAiLab/ffrecord at 3f6380c, ``src/fileio.h``.)
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import struct
import weakref
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, SupportsIndex

import numpy
from torch.utils.data import DataLoader, Dataset

from hydroslurm.core.files import atomic_file, open_regular
from hydroslurm.data.sampler import ResumableSampler
from hydroslurm.errors import RecordError, UsageError

_START = struct.Struct("<Iq")
_BYTES_PER_SAMPLE = 12
_Path = str | os.PathLike[str]


class RecordFile(contextlib.AbstractContextManager["RecordFile"]):
    """The samples of one FFRecord file, as bytes; nothing is decoded or unpickled.

    Reads have no position (``pread``), so one object can serve several threads, and a forked
    DataLoader worker shares it. Pickling one sends its path. The header is held in memory: 12 bytes
    for each sample.

    Args:
        path: a regular file, or a link to one.
        verify: check the header's CRC now and that of each sample that is read. Sizes and offsets
            are checked against the length of the file in any case, before anything is allocated.

    Raises:
        OSError: it cannot be opened, or is no regular file.
        RecordError: its header is damaged, or does not fit the length of the file.
    """

    def __init__(self, path: _Path, *, verify: bool = True) -> None:
        self.path = Path(path)
        self.verify = verify
        self._fd = open_regular(os.path.realpath(path))  # data sets are often links
        self._close = weakref.finalize(self, os.close, self._fd)
        self._size_bytes = os.fstat(self._fd).st_size
        self._crcs, self._bounds = self._header()

    def __len__(self) -> int:
        return len(self._crcs)

    def __getitem__(self, index: SupportsIndex) -> bytes:
        return self.read_batch([index])[0]

    def read_batch(self, indices: Sequence[SupportsIndex]) -> list[bytes]:
        """The samples of these numbers, in this order; negative ones count from the end.

        They are read in one pass through the file, and one that is asked for twice is read once.

        Raises:
            IndexError: there is no sample of that number.
            RecordError: a sample's CRC is wrong, or the file has become shorter; names the file
                and the number.
        """
        if not self._close.alive:
            raise UsageError(f"{self.path} was closed; open it again to read from it")
        wanted = [_number_of(index, len(self), self.path) for index in indices]
        places = {n: self._bounds[n : n + 2].tolist() for n in sorted(set(wanted))}
        # The kernel then fetches all of them at once, as FFRecord's asynchronous reads do: 256
        # samples of 8 KiB that were not cached took a fifth of the time on a virtual disk.
        for begin, end in places.values():
            os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_WILLNEED)
        found = {}
        for number, (begin, end) in places.items():
            found[number] = self._read(begin, end - begin, what=f"record {number}: ")
            if self.verify:
                self._check(f"record {number}", zlib.crc32(found[number]), self._crcs[number])
        return [found[number] for number in wanted]

    def close(self) -> None:
        """Close the file; any number of times."""
        self._close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(RecordFile, verify=self.verify), (str(self.path),)

    def _header(self) -> tuple[Any, Any]:
        """CRCs, and where samples begin, with the end of the file behind the last."""
        if self._size_bytes < _START.size:
            raise self._error(f"{self._size_bytes} bytes, too short for an FFRecord file")
        expected, count = _START.unpack(self._read(0, _START.size))
        header_bytes = _START.size + _BYTES_PER_SAMPLE * count
        if count < 0 or header_bytes > self._size_bytes:
            raise self._error(
                f"its header names {count} samples, for which {self._size_bytes} bytes are too few:"
                " it was cut off, or is no FFRecord file"
            )
        table = self._read(_START.size, header_bytes - _START.size)
        if self.verify and expected:  # an old writer has left 0 there
            crc = zlib.crc32(table, zlib.crc32(struct.pack("<q", count)))
            self._check("its header", crc, expected)
        crcs = numpy.frombuffer(table, "<u4", count)
        begins = numpy.frombuffer(table, "<i8", count, offset=4 * count)
        bounds = numpy.append(begins, self._size_bytes)
        if count and bounds[0] < header_bytes:
            raise self._error(f"record 0 begins at byte {bounds[0]}, inside the header")
        backwards = numpy.flatnonzero(bounds[1:] < bounds[:-1])  # a difference could overflow
        if len(backwards):
            begin, end = bounds[backwards[0] : backwards[0] + 2]
            where = f"begins at byte {begin} and ends at byte {end} of {self._size_bytes}"
            raise self._error(f"record {backwards[0]} {where}")
        return crcs, bounds

    def _read(self, start: int, length_bytes: int, *, what: str = "") -> bytes:
        """These bytes of the file; a call returns at most 2 GiB."""
        data = b""
        while len(data) < length_bytes:
            part = os.pread(self._fd, length_bytes - len(data), start + len(data))
            if not part:
                raise self._error(
                    f"{what}the file ends at byte {start + len(data)}, and had {self._size_bytes} "
                    "when it was opened: it was cut off meanwhile"
                )
            data = data + part if data else part
        return data

    def _check(self, what: str, crc: int, expected: int) -> None:
        if crc != expected:
            raise self._error(f"the CRC of {what} is {crc:#010x}, not {expected:#010x}")

    def _error(self, what: str) -> RecordError:
        return RecordError(f"{self.path}: {what}; fetch or write the file again")


def _number_of(index: SupportsIndex, count: int, source: object) -> int:
    """The number of a record; negative ones count from the end."""
    number = operator.index(index)
    if not -count <= number < count:
        raise IndexError(f"{source} has no record {number}, it has {count}")
    return number % count


class RecordWriter:
    """Writes an FFRecord file, to be used in a ``with`` block.

    The file appears under its name when the block ends, whole and on the disk; after an exception
    there is none, and one that was there before is as it was.

    Args:
        path: ends in ``.ffr``, which FFRecord's own reader asks for.
        n: how many samples will be written; the header before them has room for so many.

    Raises:
        UsageError: another ending, a negative ``n``, or not ``n`` samples at the end of the block.
        OSError: the file cannot be written.
    """

    def __init__(self, path: _Path, n: int) -> None:
        self.path = Path(path)
        self.n = n
        if self.path.suffix != ".ffr":
            raise UsageError(f"FFRecord files are named *.ffr, not {self.path.name!r}")
        if n < 0:
            raise UsageError(f"a number of samples of at least 0 is wanted, not {n}")
        self._at = _START.size + _BYTES_PER_SAMPLE * n
        self._crcs = array("I")
        self._bounds = array("q")
        self._file: BinaryIO | None = None

    def write(self, data: Any) -> None:
        """Add a sample: bytes, or anything else that has a contiguous buffer, all of it.

        Raises:
            UsageError: ``n`` samples were written already, or this one has no such buffer.
        """
        if self._file is None:
            raise UsageError(f"write to {self.path} inside `with RecordWriter(...) as writer`")
        if len(self._crcs) == self.n:
            raise UsageError(f"{self.path} was begun for {self.n} samples, this is one more")
        try:
            view = memoryview(data)
            content = view.cast("B") if view.nbytes else memoryview(b"")
        except TypeError as error:
            wrong = f"not {type(data).__name__} ({error}); encode it first"
            raise UsageError(f"a sample is bytes or a contiguous buffer, {wrong}") from None
        self._file.write(content)
        self._crcs.append(zlib.crc32(content))
        self._bounds.append(self._at)
        self._at += len(content)

    def __enter__(self) -> RecordWriter:
        self._exit = contextlib.ExitStack()
        self._file = self._exit.enter_context(atomic_file(self.path, mode=0o666, durable=True))
        self._file.seek(self._at)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        file, self._file = self._file, None
        if kind is not None or file is None:
            self._exit.__exit__(kind, *error)
            return
        with self._exit:
            if (written := len(self._crcs)) != self.n:
                asked = f"{self.path} was begun for {self.n} samples"
                raise UsageError(f"{asked}, and {written} were written")
            crcs, bounds = numpy.array(self._crcs, "<u4"), numpy.array(self._bounds, "<i8")
            content = struct.pack("<q", self.n) + crcs.tobytes() + bounds.tobytes()
            file.seek(0)
            file.write(struct.pack("<I", zlib.crc32(content)) + content)


class RecordDataset(Dataset[Any]):
    """The samples of several FFRecord files, one after the other.

    A subclass says in :meth:`process` what a sample's bytes are. Any DataLoader reads a batch in
    one pass through the files, because torch asks for all of it at once (``__getitems__``). A
    subclass with a ``__getitem__`` of its own gets the list of numbers there, as in FFRecord.

    Args:
        paths: a file, several in their order, or a folder: all ``*.ffr`` in it, in the order of
            their names.
        verify: as for :class:`RecordFile`.

    Raises:
        UsageError: there is no file.
        OSError, RecordError: as for :class:`RecordFile`.
    """

    def __init__(self, paths: _Path | Sequence[_Path], *, verify: bool = True) -> None:
        listed = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        if len(listed) == 1 and (folder := Path(listed[0])).is_dir():
            listed = [*sorted(folder.glob("*.ffr"))]
        if not listed:
            raise UsageError(f"{paths} has no *.ffr: wanted a file, a list of them, or a folder")
        self.files = [RecordFile(path, verify=verify) for path in listed]
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
        """The bytes of these samples, in this order, each file read in one pass."""
        numbers = numpy.array([_number_of(one, len(self), self) for one in indices], numpy.int64)
        places = numpy.searchsorted(self._ends, numbers, side="right")
        records = [b""] * len(numbers)
        for place in numpy.unique(places).tolist():
            file, mine = self.files[place], numpy.flatnonzero(places == place)
            read = file.read_batch(numbers[mine] - self._ends[place] + len(file))
            for n, record in zip(mine.tolist(), read, strict=True):
                records[n] = record
        return records

    def close(self) -> None:
        """Close all files; any number of times."""
        for file in self.files:
            file.close()

    def __repr__(self) -> str:
        return type(self).__name__

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        """One sample, or a list of them for a list of numbers, as FFRecord's data sets have it."""
        if not isinstance(index, (list, tuple)):
            return self[[index]][0]
        samples = self.process(index, self.read_batch(index))
        if len(samples) != len(index):
            got = f"{len(samples)} samples for {len(index)} records"
            raise UsageError(f"{self}.process() returned {got}; return a list with one for each")
        return samples

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        return self[list(indices)]


class RecordLoader(DataLoader[Any]):
    """torch's DataLoader with an order that can be taken up at any step, by any number of ranks.

    ``Run(loader=...)`` resumes it at once and by itself. A loop of one's own names the epoch before
    each (``loader.sampler.set_epoch(epoch)``: without it every epoch has the same order), and then
    where to begin, with :meth:`set_step`.

    Args:
        dataset: any map-style data set; a :class:`RecordDataset` is read by batches.
        batch_size: samples of this rank.
        shuffle, seed: of the order, see :class:`~hydroslurm.data.sampler.ResumableSampler`.
        skippable: ``False`` refuses :meth:`set_step`: for frameworks that keep the place in the
            data themselves, and for other samplers.
        options: of DataLoader. ``sampler``: another order; with ``skippable`` a ResumableSampler.
            ``drop_last``: leave out what makes no whole batch of all ranks.

    Raises:
        UsageError: ``skippable`` with another sampler or with batches that cannot be counted; or
            ``shuffle`` with a ``generator``, which would not give torch's order.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        skippable: bool = True,
        **options: Any,
    ) -> None:
        given = options.get("batch_sampler") or options.get("sampler")
        if shuffle and options.get("generator") is not None:
            raise UsageError(
                "shuffle=True and a generator: the order is that of seed=, so that a stop can be "
                "resumed. Give seed=, or torch's order by sampler=RandomSampler(dataset, "
                "generator=generator) and skippable=False"
            )
        if given is None:
            drop_last = bool(options.get("drop_last"))
            given = ResumableSampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last)
            options["sampler"] = given
        elif shuffle:
            raise UsageError("shuffle=True and a sampler: the sampler has the order, drop one")
        elif skippable and not isinstance(given, ResumableSampler):
            raise UsageError(
                f"skippable=True counts the samples of a ResumableSampler, not of a "
                f"{type(given).__name__}; leave the sampler out, or pass skippable=False"
            )
        self.skippable = skippable
        super().__init__(dataset, batch_size, **options)

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
