"""Reads ranges of files straight to where they belong, and verifies them on the way.

The blocks of a file have checksums (``checksummed_file.BLOCK_BYTES``), so a range is read with the
rest of the blocks that it touches: the range into its own memory, the rest into a buffer that is
used again for every block. A block is checksummed as soon as it was read, while it is in the
processor's cache. Several threads do that: reading and checksumming release the GIL.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from hydroslurm.checkpoint.checksummed_file import BLOCK_BYTES, open_checked, unreadable
from hydroslurm.checkpoint.host_memory import populate
from hydroslurm.checkpoint.manifest import FileEntry
from hydroslurm.checkpoint.storage import MOST_BUFFERS, Storage
from hydroslurm.errors import CheckpointCorrupt

READERS = 4
"""Threads of one load. More than one keeps a disk busy while another one computes checksums; all
ranks of a node read at the same time, so that more would only take turns."""

_BLOCKS_OF_A_TASK = 8
"""What a thread takes at a time: 8 MiB take a fast disk 4 ms, and the switch 0.05 ms."""

_TASKS_AHEAD = 4 * READERS
"""How many tasks are announced to the disk and not done yet: 128 MiB."""

Block = tuple[int, list["memoryview | int"]]
"""The number of a block, and where its bytes go, in order: a number is of bytes nobody wants."""


@dataclass(frozen=True)
class Source:
    """A file to read from.

    Attributes:
        entry: as the manifest has it. blocks: the checksums of its blocks, which fit the entry.
    """

    path: Path
    entry: FileEntry
    blocks: Sequence[int]


class Range(NamedTuple):
    """Bytes of a file, from ``begin`` on, and the memory that they go to."""

    begin: int
    memory: memoryview


class BlockReader:
    """Reads from several files, one after the other. A context manager: nothing that was read may
    be used before it has ended without an error."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._pool: ThreadPoolExecutor | None = None
        self._scratch = threading.local()

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def read(self, source: Source, ranges: Iterable[Range]) -> None:
        """Read ranges of a file, which are in order and do not overlap; returns when all of them
        are in memory and verified.

        Raises:
            CheckpointCorrupt: the file is not what was written.
            CheckpointError: someone else may have written it.
        """
        fd = open_checked(source.path, source.entry, storage=self._storage)
        try:
            blocks = _blocks(ranges, source.entry.size_bytes)
            task = list(islice(blocks, _BLOCKS_OF_A_TASK))
            if len(task) <= 1:  # a thread would take longer to start
                self._read_task(source, fd, task)
            else:
                self._read_by_threads(source, fd, chain(task, blocks))
        finally:
            with suppress(OSError):
                self._storage.close(fd)

    def _read_by_threads(self, source: Source, fd: int, blocks: Iterator[Block]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                min(READERS, 2 * (os.cpu_count() or 1)), thread_name_prefix="hydroslurm-read"
            )
        futures: deque[Future[None]] = deque()
        try:
            while task := list(islice(blocks, _BLOCKS_OF_A_TASK)):
                # In order, from one thread: a cold disk gave 1.7 GB/s to the readers alone, and 2.1
                # so, as to a program that reads from the beginning to the end. Not by the readers
                # for their own tasks: that was no faster than without.
                self._announce(fd, task)
                futures.append(self._pool.submit(self._read_task, source, fd, task))
                if len(futures) > _TASKS_AHEAD:
                    futures[0].result()
                    futures.popleft()
            for future in futures:
                future.result()
        finally:  # not before its threads are done with the descriptor
            for future in futures:
                if not future.cancel():
                    future.exception()

    def _announce(self, fd: int, blocks: Sequence[Block]) -> None:
        begin, end = blocks[0][0] * BLOCK_BYTES, (blocks[-1][0] + 1) * BLOCK_BYTES
        if end - begin > 2 * len(blocks) * BLOCK_BYTES:
            return  # most of that is not wanted
        with suppress(OSError):  # a hint that not every file system supports
            self._storage.read_ahead(fd, offset=begin, size_bytes=end - begin)

    def _read_task(self, source: Source, fd: int, blocks: Iterable[Block]) -> None:
        """Raises CheckpointCorrupt."""
        for number, parts in blocks:
            views = self._with_scratch(parts)
            for part in parts:  # one block at a time: the pages are in the processor's cache now
                if not isinstance(part, int):
                    populate(part)
            try:
                read_fully(self._storage, fd, views, offset=number * BLOCK_BYTES)
            except OSError as error:
                raise unreadable(source.path, error) from error
            crc = 0
            for view in views:
                crc = crc32(view, crc)
            if crc != source.blocks[number]:
                begin = number * BLOCK_BYTES
                raise CheckpointCorrupt(
                    f"{source.path} has checksum {crc:08x} from byte {begin} to "
                    f"{min(begin + BLOCK_BYTES, source.entry.size_bytes)}; "
                    f"{source.blocks[number]:08x} was written"
                )

    def _with_scratch(self, parts: Iterable[memoryview | int]) -> list[memoryview]:
        views, used = [], 0
        for part in parts:
            if isinstance(part, int):
                if used == 0 and not hasattr(self._scratch, "memory"):
                    self._scratch.memory = memoryview(bytearray(BLOCK_BYTES))
                views.append(self._scratch.memory[used : used + part])
                used += part
            else:
                views.append(part)
        return views


def read_fully(storage: Storage, fd: int, views: Sequence[memoryview], *, offset: int) -> None:
    """Fill all of these buffers; OSError when the file ends before."""
    todo = deque(views)
    while todo:
        got = storage.read(fd, list(islice(todo, MOST_BUFFERS)), offset=offset)
        if got == 0:
            raise OSError(0, "it ends before its end")
        offset += got
        while todo and got >= len(todo[0]):
            got -= len(todo.popleft())
        if got:
            todo[0] = todo[0][got:]


def _blocks(ranges: Iterable[Range], size_bytes: int) -> Iterator[Block]:
    """The blocks that the ranges touch, each with all of its bytes."""
    number, parts, at = -1, list[memoryview | int](), 0
    for one in ranges:
        begin, memory = one.begin, one.memory
        while memory:
            if begin // BLOCK_BYTES != number:
                if parts:
                    yield number, _filled(parts, at, number, size_bytes)
                number = begin // BLOCK_BYTES
                parts, at = [], number * BLOCK_BYTES
            if at < begin:
                parts.append(begin - at)
            taken = memory[: (number + 1) * BLOCK_BYTES - begin]
            parts.append(taken)
            memory = memory[len(taken) :]
            at = begin = begin + len(taken)
    if parts:
        yield number, _filled(parts, at, number, size_bytes)


def _filled(
    parts: list[memoryview | int], at: int, number: int, size_bytes: int
) -> list[memoryview | int]:
    rest = min((number + 1) * BLOCK_BYTES, size_bytes) - at
    return [*parts, rest] if rest > 0 else parts
