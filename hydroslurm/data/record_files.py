"""FFRecord files: many samples in one file, each read by its number.

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
import operator
import os
import struct
import weakref
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, SupportsIndex

import numpy

from hydroslurm.core.files import atomic_file, open_regular
from hydroslurm.errors import RecordError, UsageError

_START = struct.Struct("<Iq")
_BYTES_PER_SAMPLE = 12
_MOST_JOINED_BYTES = 8 << 20
"""Neighbours in a file are read by one call up to this size: what is read so is copied once more,
and held twice for as long."""


class RecordFile:
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

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.path = Path(path)
        self.verify = verify
        self._fd = open_regular(os.path.realpath(path))  # data sets are often links
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            self._size_bytes = os.fstat(self._fd).st_size
            self._crcs, self._bounds = self._header()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._crcs)

    def __getitem__(self, index: SupportsIndex) -> bytes:
        return self.read_batch([index])[0]

    def read_batch(self, indices: Sequence[SupportsIndex]) -> list[bytes]:
        """The samples of these numbers, in this order; negative ones count from the end.

        They are read in one pass through the file. Those that lie beside each other are read
        together, and one that is asked for twice is read once.

        Raises:
            IndexError: there is no sample of that number.
            RecordError: a sample's CRC is wrong, or the file has become shorter; names the file
                and the number.
        """
        if not self._close.alive:
            raise UsageError(f"{self.path} was closed; open it again to read from it")
        wanted = [self._number(index) for index in indices]
        found: dict[int, bytes] = {}
        runs = [
            (first, end, int(self._bounds[first]), int(self._bounds[end] - self._bounds[first]))
            for first, end in self._runs(sorted(set(wanted)))
        ]
        if len(runs) > 1:
            # The kernel then fetches all of them at once, as FFRecord's asynchronous reads do: 256
            # samples of 8 KiB that were not cached took a fifth of the time on a virtual disk.
            for _, _, start, length_bytes in runs:
                os.posix_fadvise(self._fd, start, length_bytes, os.POSIX_FADV_WILLNEED)
        for first, end, start, length_bytes in runs:
            data = self._read(start, length_bytes, sample=first)
            for number in range(first, end):
                begins, ends = (int(bound) - start for bound in self._bounds[number : number + 2])
                found[number] = self._verified(number, data[begins:ends])
        return [found[number] for number in wanted]

    def close(self) -> None:
        """Close the file; any number of times."""
        self._close()

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (str(self.path), self.verify)

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
        # an old writer has left 0 there
        if self.verify and expected:
            crc = zlib.crc32(table, zlib.crc32(struct.pack("<q", count)))
            if crc != expected:
                raise self._error(f"the CRC of its header is {crc:#010x}, not {expected:#010x}")
        crcs = numpy.frombuffer(table, "<u4", count)
        bounds = numpy.empty(count + 1, numpy.int64)
        bounds[:count] = numpy.frombuffer(table, "<i8", count, offset=4 * count)
        bounds[count] = self._size_bytes
        self._require_order(bounds, header_bytes)
        return crcs, bounds

    def _require_order(self, bounds: Any, header_bytes: int) -> None:
        """Samples begin behind the header, in order, inside the file."""
        if len(bounds) > 1 and bounds[0] < header_bytes:
            raise self._error(f"record 0 begins at byte {bounds[0]}, inside the header")
        backwards = numpy.flatnonzero(bounds[1:] < bounds[:-1])  # a difference could overflow
        if len(backwards):
            number = int(backwards[0])
            raise self._error(
                f"record {number} begins at byte {bounds[number]} and ends at byte "
                f"{bounds[number + 1]} of {self._size_bytes}"
            )

    def _number(self, index: SupportsIndex) -> int:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path} has no record {number}, it has {len(self)}")
        return number % len(self)

    def _runs(self, numbers: list[int]) -> Iterator[tuple[int, int]]:
        """Ranges of neighbours among ascending numbers, each short enough to be read at once."""
        at = 0
        while at < len(numbers):
            first, end = numbers[at], numbers[at] + 1
            at += 1
            while (
                at < len(numbers)
                and numbers[at] == end
                and self._bounds[end + 1] - self._bounds[first] <= _MOST_JOINED_BYTES
            ):
                end += 1
                at += 1
            yield first, end

    def _read(self, start: int, length_bytes: int, *, sample: int | None = None) -> bytes:
        """These bytes of the file; a call returns at most 2 GiB."""
        parts: list[bytes] = []
        done = 0
        while done < length_bytes:
            part = os.pread(self._fd, length_bytes - done, start + done)
            if not part:
                where = "" if sample is None else f"record {sample}: "
                raise self._error(
                    f"{where}the file ends at byte {start + done}, and had {self._size_bytes} when "
                    "it was opened: it was cut off meanwhile"
                )
            parts.append(part)
            done += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _verified(self, number: int, data: bytes) -> bytes:
        if self.verify and (crc := zlib.crc32(data)) != self._crcs[number]:
            raise self._error(
                f"the CRC of record {number} is {crc:#010x}, not {int(self._crcs[number]):#010x}"
            )
        return data

    def _error(self, what: str) -> RecordError:
        return RecordError(f"{self.path}: {what}; fetch or write the file again")


def _open(path: str, verify: bool) -> RecordFile:
    return RecordFile(path, verify=verify)


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

    def __init__(self, path: str | os.PathLike[str], n: int) -> None:
        self.path = Path(path)
        self.n = n
        if self.path.suffix != ".ffr":
            raise UsageError(f"FFRecord files are named *.ffr, not {self.path.name!r}")
        if n < 0:
            raise UsageError(f"a number of samples of at least 0 is wanted, not {n}")
        self._at = _START.size + _BYTES_PER_SAMPLE * n
        self._crcs = array("I")
        self._bounds = array("q")
        self._exit = contextlib.ExitStack()
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
            raise UsageError(
                f"a sample is bytes or a contiguous buffer, not {type(data).__name__} ({error}); "
                "encode it first"
            ) from None
        self._file.write(content)
        self._crcs.append(zlib.crc32(content))
        self._bounds.append(self._at)
        self._at += len(content)

    def __enter__(self) -> RecordWriter:
        self._file = self._exit.enter_context(atomic_file(self.path, mode=0o666, durable=True))
        self._file.seek(self._at)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        file, self._file = self._file, None
        if error is not None or file is None:
            self._exit.__exit__(kind, error, trace)
            return
        with self._exit:
            self._finish(file)

    def _finish(self, file: BinaryIO) -> None:
        if len(self._crcs) != self.n:
            raise UsageError(
                f"{self.path} was begun for {self.n} samples, and {len(self._crcs)} were written"
            )
        crcs = numpy.array(self._crcs, "<u4").tobytes()
        bounds = numpy.array(self._bounds, "<i8").tobytes()
        content = struct.pack("<q", self.n) + crcs + bounds
        file.seek(0)
        file.write(struct.pack("<I", zlib.crc32(content)) + content)
