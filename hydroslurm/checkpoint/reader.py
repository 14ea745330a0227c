"""The files of a checkpoint -> a state, its tensors on the CPU or laid out over the ranks.

Every byte is read once and compared with what was written. Nothing is executed: names, numbers and
shapes are the only things that a file can say, and no memory is taken for a tensor before as many
bytes of it are known to be stored.

Each block of a file has one checksum (``checksummed_file.BLOCK_BYTES``), so blocks are read whole:
straight into the tensor that fills one, else into a buffer whose parts are copied. A block is
checksummed as soon as it was read, while it is in the processor's cache. Several threads do that:
reading and checksumming release the GIL.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from isal.isal_zlib import crc32

from hydroslurm.checkpoint.checksummed_file import (
    BLOCK_BYTES,
    FileEntry,
    open_checked,
    read_checked,
    require_size,
    unreadable,
)
from hydroslurm.checkpoint.host_memory import bytes_of, populate
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.tensor_file import (
    SHARED_JSON,
    Chunk,
    PartIndex,
    files_of_part,
    frozen_part,
    is_frozen_part,
    parse,
    parts_among,
    require_tensor,
)
from hydroslurm.checkpoint.tree import JsonValue, decode, tensor_keys
from hydroslurm.checkpoint.write_plan import SharedTensor, State, box_of
from hydroslurm.errors import CheckpointCorrupt, CheckpointMissing


@dataclass(frozen=True)
class Shared:
    """What all ranks share: the state without its tensors, and what those are, by key."""

    state: dict[str, Any]
    tensors: dict[str, SharedTensor]


class CheckpointFiles:
    """The files of one checkpoint, each compared with the manifest when it is read; an index is
    read once. A part has the number of its rank, or ``tensor_file.frozen_part`` of it."""

    def __init__(self, folder: Path, entries: Mapping[str, FileEntry], *, storage: Storage) -> None:
        self.folder = folder
        self.storage = storage
        self.entries = entries
        self._indexes: dict[int, PartIndex] = {}

    @property
    def ranks(self) -> list[int]:
        """Those that took part in the save."""
        return [number for number in self.parts if not is_frozen_part(number)]

    @property
    def parts(self) -> list[int]:
        """All of them."""
        return parts_among(self.entries)

    def state(
        self,
        *,
        rank: int,
        only: Collection[str] | None = None,
        like: Mapping[str, Any] | None = None,
    ) -> State:
        """Read a state, or the names in ``only``, laid out as ``like`` says.

        A rank that had no part in the save has nothing of its own.

        Raises:
            CheckpointCorrupt: a file is missing or is not what was written.
            CheckpointError: someone else may have written one.
            CheckpointMissing: a name in ``only`` was not saved.
        """
        shared = self.shared()
        state, own = shared.state, self.index(rank).own if rank in self.ranks else {}
        if only is not None:
            missing = sorted(set(only) - set(state) - set(own))
            if missing:
                raise CheckpointMissing(
                    f"{self.folder} has no {', '.join(missing)}; it has {', '.join([*state, *own])}"
                )
            state = {name: value for name, value in state.items() if name in only}
            own = {name: value for name, value in own.items() if name in only}
        layouts: dict[str, torch.Tensor | None] = {}
        for name, value in state.items():
            layouts |= tensor_keys(value, (like or {}).get(name))
        wanted = [*self._wanted_of_shared(layouts, shared), *self._wanted_of_own(own, rank)]
        tensors = self._landed(self._landings(wanted, first=rank))
        return State(shared=_decoded(state, tensors), own=_decoded(own, tensors))

    def check(self) -> None:
        """Put together all that :meth:`state` reads on any rank, with tensors that have no memory
        in the place of those that are stored. Reads the indexes only.

        Raises:
            CheckpointCorrupt, CheckpointError: as :meth:`state`.
        """
        shared = self.shared()
        keys = tensor_keys(list(shared.state.values()))
        of_shared = self._landings(self._wanted_of_shared(keys, shared), first=0)
        _decoded(shared.state, _without_values(of_shared))
        for part in self.parts:
            own = self.index(part).own
            of_own = self._landings(self._wanted_of_own(own, part), first=part)
            _decoded(own, _without_values(of_own))

    def own(self, *, rank: int) -> dict[str, Any]:
        """The ``own`` of one rank.

        Raises:
            CheckpointMissing: that rank had no part in the save.
            CheckpointCorrupt, CheckpointError: as :meth:`state`.
        """
        if rank not in self.ranks:
            raise CheckpointMissing(
                f"{self.folder} has nothing of rank {rank}: {len(self.ranks)} ranks saved it"
            )
        own = self.index(rank).own
        landings = self._landings(self._wanted_of_own(own, rank), first=rank)
        return _decoded(own, self._landed(landings))

    def shared(self) -> Shared:
        """Raises CheckpointCorrupt, CheckpointError."""
        text = self._read(SHARED_JSON)
        try:
            shared = msgspec.convert(parse(text), Shared)
            for one in shared.tensors.values():
                require_tensor(one.shape, one.dtype)
        except ValueError as error:
            path = self.folder / SHARED_JSON
            raise CheckpointCorrupt(f"{path} cannot be read: {error!s:.200}") from error
        return shared

    def index(self, part: int) -> PartIndex:
        """Raises CheckpointCorrupt, CheckpointError."""
        if part not in self._indexes:
            path = self.index_path(part)
            self._indexes[part] = PartIndex.from_json(
                self._read(path.name),
                where=path,
                rank=part,
                tensors=self.tensors(part)[1],
            )
        return self._indexes[part]

    def index_path(self, part: int) -> Path:
        return self.folder / files_of_part(part)[0]

    def tensors(self, part: int) -> tuple[Path, FileEntry]:
        """A part's file of tensors. Raises CheckpointCorrupt: there is none."""
        _, name = files_of_part(part)
        return self.folder / name, self._entry(name)

    def _entry(self, name: str) -> FileEntry:
        try:
            return self.entries[name]
        except KeyError:
            raise CheckpointCorrupt(f"{self.folder} has no {name}") from None

    def _read(self, name: str) -> bytes:
        return read_checked(self.folder / name, self._entry(name), storage=self.storage)

    def _wanted_of_shared(
        self, layouts: Mapping[str, torch.Tensor | None], shared: Shared
    ) -> list[Landing]:
        for key in layouts:
            if key not in shared.tensors:
                raise CheckpointCorrupt(f"{self.folder / SHARED_JSON} has no tensor {key!r:.80}")
        return [Landing.of(key, shared.tensors[key], template=one) for key, one in layouts.items()]

    def _wanted_of_own(self, own: Mapping[str, JsonValue], rank: int) -> list[Landing]:
        keys = tensor_keys(list(own.values()))
        stored = {one.key: one for one in self.index(rank).chunks} if keys else {}
        for key in keys:
            if key not in stored:
                raise CheckpointCorrupt(f"{self.index_path(rank)} has no {key!r:.80}")
        tensors = {key: SharedTensor(stored[key].shape, stored[key].dtype, rank) for key in keys}
        return [Landing.of(key, one, template=None) for key, one in tensors.items()]

    def _landings(self, wanted: Iterable[Landing], *, first: int) -> dict[str, Landing]:
        """Find all pieces of some tensors, before memory is taken for any.

        Args:
            first: the rank whose part holds, if nothing has changed since the save, what this
                process holds of sharded tensors.
        """
        landings = {one.key: one for one in wanted}
        there, asked = set(self.parts), set[int]()
        while lacking := {key: one for key, one in landings.items() if one.lacking}:
            parts = _likely(lacking.values(), first) & there - asked or there - asked
            if not parts:
                key, one = next(iter(lacking.items()))
                raise CheckpointCorrupt(
                    f"the files of {self.folder} lack {one.lacking} of the values of {key!r:.80}"
                )
            part = min(parts)
            asked.add(part)
            where = self.index_path(part)
            for chunk in self.index(part).chunks:
                if chunk.key in lacking:
                    lacking[chunk.key].take(part, chunk, where=where)
        return landings

    def _landed(self, landings: Mapping[str, Landing]) -> dict[str, torch.Tensor]:
        """Read all pieces; the tensors by key."""
        pieces: dict[int, list[tuple[Landing, Chunk, Box]]] = {}
        for landing in landings.values():
            for part, chunk, common in landing.pieces:
                pieces.setdefault(part, []).append((landing, chunk, common))
        for part in sorted(pieces):
            require_size(*self.tensors(part), storage=self.storage)
        finals: list[Callable[[], object]] = []
        memory = {key: _memory_for(one, finals) for key, one in landings.items()}
        with ThreadPoolExecutor(READERS, thread_name_prefix="hydroslurm-read") as pool:
            for part in sorted(pieces):
                copies: list[Callable[[], object]] = []
                ranges = [
                    _range(chunk, common, one.box, memory[one.key][1], copies)
                    for one, chunk, common in pieces.pop(part)
                ]
                source = Source(*self.tensors(part), self.index(part).blocks)
                _read(source, ranges, storage=self.storage, pool=pool)
                with torch.no_grad():
                    for copy in copies:  # frees the memory of what must be copied once more
                        copy()
        with torch.no_grad():
            for copy in finals:
                copy()
        return {key: found for key, (found, _) in memory.items()}


def _without_values(landings: Mapping[str, Landing]) -> dict[str, torch.Tensor]:
    return {
        key: torch.empty(one.shape, dtype=one.dtype, device="meta") for key, one in landings.items()
    }


def _decoded(state: Mapping[str, JsonValue], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: decode(value, tensors) for name, value in state.items()}


def _likely(landings: Iterable[Landing], first: int) -> set[int]:
    """The parts that have what is lacking, if nothing has changed since the save: so that with
    thousands of ranks not everybody reads the indexes of all."""
    found, ranks = set[int](), set[int]()
    for landing in landings:
        if landing.writer is None:
            ranks |= {first, *landing.replicas}
        else:
            found.add(landing.writer)
    return found | ranks | {frozen_part(rank) for rank in ranks}


READERS = 4
"""Threads of one load. More than one keeps a disk busy while another one computes checksums; all
ranks of a node read at the same time, so that more would only take turns."""

_BLOCKS_OF_A_TASK = 8
"""What a thread takes at a time: 8 MiB take a fast disk 4 ms, and the switch 0.05 ms."""

_TASKS_AHEAD = 4 * READERS
"""How many tasks are announced to the disk and not done yet: 128 MiB."""


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

    def slices(self, inner: Box) -> tuple[slice, ...]:
        """Of a box inside this one, for a tensor that holds this one."""
        return tuple(
            slice(begin - start, begin - start + size)
            for start, begin, size in zip(self.offsets, inner.offsets, inner.sizes, strict=True)
        )


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


def _range(
    chunk: Chunk, common: Box, wanted: Box, memory: torch.Tensor, copies: list[Any]
) -> Range:
    """What is to be read of a piece, and where to; ``copies`` gets what is to be done afterwards.

    Args:
        common: what of the piece belongs into the tensor.
        wanted: the box of the whole that ``memory`` holds, in C order.
    """
    box = Box(chunk.offsets, chunk.sizes)
    if box == common == wanted:
        return Range(chunk.at_bytes, bytes_of(memory))
    place = torch.empty(chunk.sizes, device="meta")[box.slices(common)]
    steps, begin = place.stride(), int(place.storage_offset())
    count = 1 + sum((n - 1) * step for n, step in zip(common.sizes, steps, strict=True))
    into = memory[wanted.slices(common)]
    target = into
    if count != common.volume or not into.is_contiguous():
        target = torch.empty(count, dtype=memory.dtype)
        copies.append(lambda: into.copy_(target.as_strided(common.sizes, steps)))
    return Range(chunk.at_bytes + begin * memory.dtype.itemsize, bytes_of(target))


def _memory_for(wanted: Landing, finals: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
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


def _read(
    source: Source, ranges: Iterable[Range], *, storage: Storage, pool: ThreadPoolExecutor
) -> None:
    """Read ranges of a file; returns when all of them are in memory and verified.

    Raises:
        CheckpointCorrupt: the file is not what was written.
        CheckpointError: someone else may have written it.
    """
    by_block: dict[int, list[Range]] = {}
    for begin, memory in ranges:
        while memory:
            number = begin // BLOCK_BYTES
            part = memory[: (number + 1) * BLOCK_BYTES - begin]
            by_block.setdefault(number, []).append(Range(begin, part))
            begin, memory = begin + len(part), memory[len(part) :]
    blocks, tasks = iter(sorted(by_block.items())), deque[Future[None]]()
    fd = open_checked(source.path, source.entry, storage=storage)
    try:
        while task := list(islice(blocks, _BLOCKS_OF_A_TASK)):
            # In order, from one thread: a cold disk gave 1.7 GB/s to the readers alone, and 2.1 so,
            # as to a program that reads from the beginning to the end. Not by the readers for their
            # own tasks: that was no faster than without.
            begin, size_bytes = (
                task[0][0] * BLOCK_BYTES,
                (task[-1][0] + 1 - task[0][0]) * BLOCK_BYTES,
            )
            if size_bytes <= 2 * len(task) * BLOCK_BYTES:  # else most of that is not wanted
                with suppress(OSError):  # a hint that not every file system supports
                    storage.read_ahead(fd, offset=begin, size_bytes=size_bytes)
            tasks.append(pool.submit(_read_blocks, source, fd, task, storage=storage))
            if len(tasks) > _TASKS_AHEAD:
                tasks.popleft().result()
        while tasks:
            tasks.popleft().result()
    finally:  # not before its threads are done with the descriptor
        for left in tasks:
            if not left.cancel():
                left.exception()
        with suppress(OSError):
            storage.close(fd)


def _read_blocks(
    source: Source, fd: int, blocks: Iterable[tuple[int, list[Range]]], *, storage: Storage
) -> None:
    """Read and verify blocks, each with the ranges that lie in it; raises CheckpointCorrupt."""
    buffer = memoryview(b"")
    for number, ranges in blocks:
        begin = number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, source.entry.size_bytes)
        for one in ranges:
            populate(one.memory)
        is_whole = len(ranges[0].memory) == end - begin
        if not is_whole and not buffer:
            buffer = memoryview(bytearray(BLOCK_BYTES))
        block = ranges[0].memory if is_whole else buffer[: end - begin]
        try:
            read_fully(storage, fd, block, offset=begin)
        except OSError as error:
            raise unreadable(source.path, error) from error
        if (crc := crc32(block)) != source.blocks[number]:
            raise CheckpointCorrupt(
                f"{source.path} has checksum {crc:08x} from byte {begin} to {end}; "
                f"{source.blocks[number]:08x} was written"
            )
        for one in () if is_whole else ranges:
            first = one.begin - begin
            one.memory[:] = block[first : first + len(one.memory)]


def read_fully(storage: Storage, fd: int, into: memoryview, *, offset: int) -> None:
    """Fill a buffer; OSError when the file ends before."""
    while into:
        if not (got := storage.read(fd, into, offset=offset)):
            raise OSError(0, "it ends before its end")
        offset, into = offset + got, into[got:]
