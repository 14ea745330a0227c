"""A state, and which rank writes what of it. Pure: the ranks do not communicate.

    a tensor of ``own``               its rank
    a plain tensor of ``shared``      one rank: large ones are distributed by size, small: rank 0
    a DTensor of ``shared``           each rank its shard; of replicas, the first one

Every rank computes this from keys, shapes and types, which are the same everywhere; the ranks
compare their ``layout`` to be sure.
"""

from __future__ import annotations

import heapq
import json
import math
import zlib
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from hydroslurm.checkpoint.outline import NoOutlineError, Outline
from hydroslurm.checkpoint.tensor_file import Laid, Piece, dtype_name, lay_out
from hydroslurm.checkpoint.tree import JsonValue, encode, is_dtensor
from hydroslurm.errors import UnsavableState, UsageError

LEAST_DIVIDED_BYTES = 64 * 1024
"""A plain tensor of at least this size is taken to be a replica, bit for bit the same on all ranks,
like parameters and optimizer states under DDP. Smaller ones are rank 0's: the BatchNorm statistics
of DDP ranks differ, and rank 0's are the ones that torch.save would have kept."""

TALLY_MODULUS = 2**61 - 1
"""A prime, so that a number of values times its weight is never nothing."""


@dataclass(frozen=True)
class State:
    """What is saved, by name: what all ranks share, and this rank's own."""

    shared: Mapping[str, Any]
    own: Mapping[str, Any]


class SharedTensor(NamedTuple):
    """A tensor that all ranks share. A named tuple, because there are thousands.

    Attributes:
        dtype: its name without ``torch.``.
        writer: the rank that writes it; None for one that the ranks write in pieces.
    """

    shape: tuple[int, ...]
    dtype: str
    writer: int | None


Whole: TypeAlias = tuple[str, tuple[int, ...], torch.dtype, "int | None"]


@dataclass(frozen=True)
class Layout:
    """What one rank writes of every state that looks alike, without the values. A saver keeps it
    from save to save, with the texts that are made of it.

    Attributes:
        pieces: the tensors, or parts of them, that this rank writes: of what is shared, then own.
        taken: of the plain tensors that the ranks share, in the order of their keys, the numbers of
            those that this rank writes.
        wholes: of every tensor that the ranks share: key, shape, dtype, and the rank that writes it
            (None: in pieces). What is made of it is not made while the training waits.
        state_bytes: of the state of all ranks, assuming that each has as much of its own.
        outline: of what is shared; None if that must be walked each time.
    """

    rank: int
    world_size: int
    pieces: tuple[Piece, ...]
    taken: array[int]
    wholes: tuple[Whole, ...]
    state_bytes: int
    outline: Outline | None = field(compare=False)

    @cached_property
    def laid(self) -> Laid:
        """How the pieces lie in this rank's file."""
        return lay_out(self.pieces, rank=self.rank)

    @cached_property
    def shared_tensors(self) -> bytes:
        """Of the tensors that the ranks share: key -> shape, dtype, writer, as JSON."""
        names = {dtype: dtype_name(dtype) for _, _, dtype, _ in self.wholes}
        found = {
            key: SharedTensor(shape, names[dtype], writer)
            for key, shape, dtype, writer in self.wholes
        }
        return json.dumps(found, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """Equal on all ranks if they have the same tensors."""
        lines = sorted(
            f"{key} {shape} {dtype} {writer is None}" for key, shape, dtype, writer in self.wholes
        )
        return f"{len(lines)} tensors, {zlib.crc32(chr(10).join(lines).encode()):08x}"

    @cached_property
    def tally(self) -> int:
        """Of the values of shared tensors that this rank writes. Those of all ranks together are
        :attr:`whole_tally` if they write every value once."""
        shared = {key for key, _, _, _ in self.wholes}
        return tally_of((one.key, math.prod(one.sizes)) for one in self.pieces if one.key in shared)

    @cached_property
    def whole_tally(self) -> int:
        """Of all values of the shared tensors."""
        return tally_of((key, math.prod(shape)) for key, shape, _, _ in self.wholes)


@dataclass(frozen=True)
class WritePlan:
    """What one rank has to write of a state.

    Attributes:
        shared: the state that all ranks share, without tensors; only rank 0 writes it.
        own: this rank's own state, without tensors.
        tensors: one for each piece of the layout; the caller's own memory, not a copy.
    """

    layout: Layout
    shared: dict[str, JsonValue]
    own: dict[str, JsonValue]
    tensors: tuple[torch.Tensor, ...]

    @property
    def state_bytes(self) -> int:
        """Of the state of all ranks."""
        return self.layout.state_bytes


def divide(state: State, *, rank: int, world_size: int, known: Layout | None = None) -> WritePlan:
    """What this rank writes of a state.

    Args:
        known: the layout of an earlier one, which is the new plan's as well if it still fits.

    Raises:
        UnsavableState: the state holds what cannot be saved.
        UsageError: an invalid name.
    """
    for name in (*state.shared, *state.own):
        if not isinstance(name, str) or not name or name.startswith("$"):
            raise UsageError(f"a state's name must be a word that does not begin with $: {name!r}")
    own_tree, own = encode(dict(state.own), prefix=f"rank-{rank:05d}")
    assert isinstance(own_tree, dict)
    whole = dict(state.shared)
    if known is not None and (known.rank, known.world_size) == (rank, world_size):
        again = _again(whole, own, known)
        if again is not None:
            return WritePlan(known, again[0], own_tree, again[1])
    shared_tree, shared = encode(whole, prefix="shared")
    assert isinstance(shared_tree, dict)
    outline = None
    with suppress(NoOutlineError):
        outline = Outline(whole, shared_tree, prefix="shared")
    layout, tensors = _laid_out(shared, own, outline, rank=rank, world_size=world_size)
    if outline is None and known == layout:
        layout = known
    return WritePlan(layout, shared_tree, own_tree, tensors)


def _again(
    whole: Mapping[str, Any], own: Mapping[str, torch.Tensor], known: Layout
) -> tuple[dict[str, JsonValue], tuple[torch.Tensor, ...]] | None:
    """The tree and the tensors of a state that is laid out as another one was; None if it is
    not."""
    if known.outline is None:
        return None
    pieces = tuple(_piece_of_own(key, one) for key, one in own.items())
    if pieces != known.pieces[len(known.taken) :]:
        return None
    found = known.outline.again(whole)
    if found is None:
        return None
    tree, tensors = found
    assert isinstance(tree, dict)
    if len(known.taken) != len(tensors):
        tensors = [tensors[number] for number in known.taken]
    return tree, (*tensors, *own.values())


def _laid_out(
    shared: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    outline: Outline | None,
    *,
    rank: int,
    world_size: int,
) -> tuple[Layout, tuple[torch.Tensor, ...]]:
    writers: Mapping[str, int] = dict.fromkeys(shared, 0)
    if world_size > 1:
        sizes_bytes = {key: one.nbytes for key, one in shared.items() if not is_dtensor(one)}
        writers = owners(sizes_bytes, world_size)
    same: dict[tuple[int, ...], tuple[int, ...]] = {}  # of thousands of shapes few differ
    pieces, tensors, wholes, taken = [], [], list[Whole](), []
    for number, (key, one) in enumerate(shared.items()):
        shape = tuple(one.shape)
        shape = same.setdefault(shape, shape)
        if is_dtensor(one):
            wholes.append((key, shape, one.dtype, None))
            part = _part_of_dtensor(key, one)
            if part is not None:
                offsets, local = part
                pieces.append(_piece(key, shape, offsets, local, same))
                tensors.append(local)
            continue
        if writers[key] == rank:
            pieces.append(_piece(key, shape, (0,) * len(shape), one, same))
            tensors.append(one)
            taken.append(number)
        wholes.append((key, shape, one.dtype, writers[key]))
    layout = Layout(
        rank=rank,
        world_size=world_size,
        pieces=(*pieces, *(_piece_of_own(key, one) for key, one in own.items())),
        taken=array("q", taken),  # a tenth of what a tuple of thousands of numbers takes
        wholes=tuple(wholes),
        state_bytes=_bytes(shared) + world_size * _bytes(own),
        outline=outline,
    )
    return layout, (*tensors, *own.values())


def tally_of(values: Iterable[tuple[str, int]]) -> int:
    """A sum over keys and the numbers of values that there are of each. Every key has its own
    weight: what one has too many does not make up for what another one lacks."""
    return sum((zlib.crc32(key.encode()) | 1) * number for key, number in values) % TALLY_MODULUS


def plan_of(state: State | WritePlan, *, rank: int, world_size: int) -> WritePlan:
    """What this rank writes of a state, which may have been divided before."""
    if isinstance(state, WritePlan):
        return state
    return divide(state, rank=rank, world_size=world_size)


def owners(sizes_bytes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Key -> the rank that writes this plain tensor: the largest first, each to the rank that has
    the least so far."""
    small = [key for key, size_bytes in sizes_bytes.items() if size_bytes < LEAST_DIVIDED_BYTES]
    found = dict.fromkeys(small, 0)
    loads = [(0, rank) for rank in range(1, world_size)]
    loads.insert(0, (sum(sizes_bytes[key] for key in small), 0))
    heapq.heapify(loads)
    large = [key for key in sizes_bytes if key not in found]
    for key in sorted(large, key=lambda key: (-sizes_bytes[key], key)):
        load_bytes, rank = loads[0]
        found[key] = rank
        heapq.heapreplace(loads, (load_bytes + sizes_bytes[key], rank))
    return found


def _piece(
    key: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    tensor: torch.Tensor,
    same: dict[tuple[int, ...], tuple[int, ...]],
) -> Piece:
    sizes, strides = tuple(tensor.shape), tensor.stride()
    sizes, strides = same.setdefault(sizes, sizes), same.setdefault(strides, strides)
    offsets = same.setdefault(offsets, offsets)
    return Piece(key, shape, offsets, sizes, strides, tensor.dtype, tensor.is_cuda)


def _piece_of_own(key: str, tensor: torch.Tensor) -> Piece:
    if is_dtensor(tensor):
        raise UnsavableState(
            f"{key} is a DTensor in what is one rank's own; tensors that the ranks share belong to "
            "the state that they have in common: register the object that holds it"
        )
    return _piece(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor, {})


def _part_of_dtensor(key: str, tensor: Any) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """The part that this rank writes, if any, and where it begins."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsavableState(
            f"{key} is a DTensor with the placements {tensor.placements}: its values are sums that "
            "nobody has computed yet. Call redistribute() or full_tensor() before it is saved"
        )
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return None
    replicas = [
        where
        for where, placement in zip(place, tensor.placements, strict=True)
        if placement.is_replicate() or tensor.numel() == 0
    ]
    local = tensor.to_local().detach()
    if any(replicas) or (local.numel() == 0 and tensor.numel() != 0):
        return None
    if tensor.numel() == 0:  # its shards are all alike: one stands for the whole
        return (0,) * tensor.dim(), local.new_empty(tensor.shape)
    offsets, sizes = box_of(tensor)
    assert sizes == tuple(local.shape), f"{key}: {sizes}, {local.shape}"
    return offsets, local


def box_of(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the part of a DTensor that this rank holds begins in the whole, and its sizes."""
    # imported here: it takes 0.2 s, and a training without DTensors never needs it
    from torch.distributed.checkpoint.planner_helpers import _create_write_items

    (item,) = _create_write_items("", tensor)
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
