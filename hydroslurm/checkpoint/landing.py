"""Reads the pieces of saved tensors to where they belong, and verifies them on the way: straight
into the tensors that are asked for, where both lie in one piece in memory, else over a copy.

The blocks of a file have checksums (``checksummed_file.BLOCK_BYTES``), so a range is read with the
rest of the blocks that it touches: the range into its own memory, the rest into a buffer that is
used again for every block. A block is checksummed as soon as it was read, while it is in the
processor's cache. Several threads do that: reading and checksumming release the GIL.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from isal.isal_zlib import crc32

from hydroslurm.checkpoint.checksummed_file import (
    BLOCK_BYTES,
    FileEntry,
    open_checked,
    require_size,
    unreadable,
)
from hydroslurm.checkpoint.host_memory import bytes_of, populate
from hydroslurm.checkpoint.storage import MOST_BUFFERS, Storage
from hydroslurm.checkpoint.tensor_file import Chunk, PartIndex
from hydroslurm.checkpoint.write_plan import SharedTensor, box_of
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

Later: TypeAlias = "list[Callable[[], object]]"
"""What is to be done when something has been read."""


class Box(NamedTuple):
    """A part of a tensor: where it begins, and its sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Of its values."""
        return math.prod(self.sizes)

    def common(self, other: Box) -> Box | None:
        """What is in both; None if nothing is."""
        if self == other:
            return None if 0 in self.sizes else self
        begins = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + n, b + m) - begin
            for a, n, b, m, begin in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, begins, strict=True
            )
        )
        return Box(begins, sizes) if all(size > 0 for size in sizes) else None

    def span(self, inner: Box) -> tuple[int, int]:
        """Of a box inside of this one, in C order: its first value, and how many from there on to
        its last one. It is contiguous if these are as many as it has."""
        first, last = 0, 0
        for at, size, offset, count in zip(
            self.offsets, self.sizes, inner.offsets, inner.sizes, strict=True
        ):
            first = first * size + offset - at
            last = last * size + offset - at + count - 1
        return first, last - first + 1

    def strides(self) -> tuple[int, ...]:
        """Of its values in C order."""
        found = [1]
        for size in reversed(self.sizes[1:]):
            found.append(found[-1] * size)
        return tuple(reversed(found)) if self.sizes else ()

    def view(self, flat: torch.Tensor, inner: Box, *, begin: int = 0) -> torch.Tensor:
        """The values of a box inside of this one.

        Args:
            flat: the values of this box in C order, from number ``begin`` on.
        """
        first, _ = self.span(inner)
        return flat.as_strided(inner.sizes, self.strides(), flat.storage_offset() + first - begin)


@dataclass(eq=False)
class Landing:
    """A tensor that is read, or this rank's part of one, and the pieces of files that it is made
    of.

    Attributes:
        shape: of the whole. box: what is wanted of it.
        template: the DTensor that it is laid out like; None: a plain tensor.
        writer: the rank that has written all of it; None if it is not known to be only one.
        replicas: ranks that hold the same part now.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    template: Any = None
    writer: int | None = None
    replicas: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.lacking = self.box.volume
        self.pieces: list[tuple[int, Chunk, Box]] = []
        self._seen: set[tuple[int, ...]] = set()

    @classmethod
    def of(cls, key: str, one: SharedTensor, *, template: Any) -> Landing:
        """What a template asks for: of the same shape the part that this rank holds of it,
        otherwise, and without one, the whole."""
        shape, dtype = one.shape, getattr(torch, one.dtype)
        if template is None or tuple(template.shape) != shape:
            return cls(key, shape, dtype, Box((0,) * len(shape), shape), writer=one.writer)
        template = template.detach()
        if template.device_mesh.get_coordinate() is None or template.to_local().numel() == 0:
            box = Box((0,), (0,))
        else:
            box = Box(*box_of(template))
        return cls(key, shape, dtype, box, template, one.writer, _replicas(template))

    def take(self, rank: int, chunk: Chunk, *, where: Path) -> None:
        """Look at one more piece that a rank has written; one that two have written counts once.

        Raises:
            CheckpointCorrupt: it is of another tensor, or overlaps others.
        """
        if chunk.shape != self.shape or chunk.torch_dtype != self.dtype:
            raise CheckpointCorrupt(
                f"{where} has {chunk.key!r:.80} as {chunk.dtype} of shape {chunk.shape}; expected "
                f"{self.dtype} of shape {self.shape}"
            )
        common = Box(chunk.offsets, chunk.sizes).common(self.box)
        if common is None or chunk.offsets in self._seen:
            return
        self._seen.add(chunk.offsets)
        self.lacking -= common.volume
        if self.lacking < 0:
            raise CheckpointCorrupt(f"{where}: a piece of {chunk.key!r:.80} overlaps others")
        self.pieces.append((rank, chunk, common))


def land(
    landings: Iterable[Landing],
    *,
    index: Callable[[int], PartIndex],
    tensors: Callable[[int], tuple[Path, FileEntry]],
    storage: Storage,
) -> dict[str, torch.Tensor]:
    """Read all pieces; the tensors by key.

    Args:
        index, tensors: of a rank.

    Raises:
        CheckpointCorrupt: a file is not what was written.
        CheckpointError: someone else may have written it.
    """
    landings = tuple(landings)
    ranks = {rank for one in landings for rank, _, _ in one.pieces}
    for rank in sorted(ranks):
        require_size(*tensors(rank), storage=storage)
    found: dict[str, torch.Tensor] = {}
    ranges: dict[int, list[Range]] = {rank: [] for rank in sorted(ranks)}
    copies: dict[int, Later] = {rank: [] for rank in ranks}
    finals: Later = []
    for one in landings:
        found[one.key], memory = _memory_for(one, finals)
        flat = memory.reshape(-1)
        for rank, chunk, common in one.pieces:
            ranges[rank].append(_range(chunk, common, one.box, flat, copies[rank]))
    with BlockReader(storage) as reader, torch.no_grad():
        for rank in sorted(ranks):
            source = Source(*tensors(rank), index(rank).blocks)
            reader.read(source, sorted(ranges.pop(rank), key=lambda one: one.begin))
            for copy in copies.pop(rank):  # gives back the memory of what must be copied once more
                copy()
        for copy in finals:
            copy()
    return found


def _range(chunk: Chunk, common: Box, into: Box, memory: torch.Tensor, copies: Later) -> Range:
    """What is to be read of a piece, and where to; ``copies`` gets what is to be done afterwards.

    Args:
        common: what of the piece belongs into the tensor.
        into: the box of the whole that ``memory`` is, flat and in C order.
    """
    box = Box(chunk.offsets, chunk.sizes)
    begin, count = box.span(common)
    first, spread = into.span(common)
    if count == spread == common.volume:
        target = memory[first : first + count]
    else:
        target = torch.empty(count, dtype=memory.dtype)
        source = box.view(target, common, begin=begin)
        copies.append(lambda: into.view(memory, common).copy_(source))
    return Range(chunk.at_bytes + begin * memory.dtype.itemsize, bytes_of(target))


def _memory_for(wanted: Landing, finals: Later) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor, and its local values as a contiguous tensor on the CPU. Where these are not the
    same memory, ``finals`` gets the copying."""
    if wanted.template is None:
        # Of its own, not a view of the file: what an optimizer keeps of a tensor should not keep
        # the others. And it begins where torch puts tensors, on a multiple of 64 bytes: a matrix
        # product adds in another order where its operands lie otherwise, and the bits of a resumed
        # training would not be those of an undisturbed one (seen, with a batch of 18 x 20 values
        # that had been fetched ahead).
        found = torch.empty(wanted.shape, dtype=wanted.dtype)
        return found, found
    found = torch.empty_like(wanted.template, dtype=wanted.dtype)
    local: torch.Tensor = found.to_local()  # type: ignore[attr-defined]  # a DTensor
    if local.device.type == "cpu" and local.is_contiguous():
        return found, local
    memory = torch.empty(local.shape, dtype=wanted.dtype)
    finals.append(lambda: local.copy_(memory))
    return found, memory


def _replicas(template: Any) -> tuple[int, ...]:
    """The rank that writes for all those that hold the same part as this one."""
    mesh = template.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return ()
    writer = tuple(
        0 if placement.is_replicate() else where
        for where, placement in zip(place, template.placements, strict=True)
    )
    return (int(mesh.mesh[writer]),)


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
