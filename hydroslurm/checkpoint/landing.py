"""Where the pieces of saved tensors go: straight into the tensors that are asked for, where both
lie in one piece in memory, else over a copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from hydroslurm.checkpoint.blocks import BlockReader, Range, Source
from hydroslurm.checkpoint.checksummed_file import require_size
from hydroslurm.checkpoint.host_memory import bytes_of
from hydroslurm.checkpoint.manifest import FileEntry
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.tensor_file import Chunk, PartIndex
from hydroslurm.checkpoint.write_plan import SharedTensor, box_of
from hydroslurm.errors import CheckpointCorrupt

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
    if box == into:  # nothing has changed since the save
        return Range(chunk.at_bytes, bytes_of(memory))
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
