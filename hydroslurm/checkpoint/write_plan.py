"""A state, and which rank writes what of it. Pure: the ranks do not communicate.

    a tensor of ``own``               its rank
    a plain tensor of ``shared``      one rank: large ones are distributed by size, small: rank 0
    a DTensor of ``shared``           each rank its shard; of replicas, the first one

Every rank computes this from keys, shapes and types, which are the same everywhere; the ranks
compare their ``layout`` to be sure.
"""

from __future__ import annotations

import gc
import heapq
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

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


class Shard(NamedTuple):
    """A part of a tensor: a box inside the whole.

    Attributes:
        key: of the whole tensor. shape: of the whole tensor.
        offsets: where the box begins.
        tensor: the values of the box; the caller's own memory, not a copy.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor


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
class WritePlan:
    """What one rank has to write of a state.

    Attributes:
        shared: the state that all ranks share, without tensors; only rank 0 writes it.
        own: this rank's own state, without tensors.
        shards: the tensors, or parts of them, that this rank writes.
        state_bytes: of the state of all ranks, assuming that each has as much of its own.
        wholes: of every tensor that the ranks share: key, shape, dtype, and the rank that writes it
        (None: in pieces). What is made of it is not made while the training waits.
    """

    rank: int
    world_size: int
    shared: dict[str, JsonValue]
    own: dict[str, JsonValue]
    shards: tuple[Shard, ...]
    state_bytes: int
    wholes: tuple[Whole, ...]

    @cached_property
    def shared_tensors(self) -> Mapping[str, SharedTensor]:
        """By key; the same on all ranks."""
        names = {dtype: str(dtype).removeprefix("torch.") for _, _, dtype, _ in self.wholes}
        return {
            key: SharedTensor(shape, names[dtype], writer)
            for key, shape, dtype, writer in self.wholes
        }

    @cached_property
    def layout(self) -> str:
        """Equal on all ranks if they have the same tensors."""
        lines = sorted(
            f"{key} {shape} {dtype} {writer is None}" for key, shape, dtype, writer in self.wholes
        )
        return f"{len(lines)} tensors, {zlib.crc32(chr(10).join(lines).encode()):08x}"

    @property
    def tally(self) -> int:
        """Of the values of shared tensors that this rank writes. Those of all ranks together are
        :attr:`whole_tally` if they write every value once."""
        return tally_of(
            (one.key, one.tensor.numel()) for one in self.shards if one.key in self.shared_tensors
        )

    @property
    def whole_tally(self) -> int:
        """Of all values of the shared tensors."""
        return tally_of((key, math.prod(one.shape)) for key, one in self.shared_tensors.items())


def divide(state: State, *, rank: int, world_size: int) -> WritePlan:
    """What this rank writes of a state.

    Raises:
        UnsavableState: the state holds what cannot be saved.
        UsageError: an invalid name.
    """
    for name in (*state.shared, *state.own):
        if not isinstance(name, str) or not name or name.startswith("$"):
            raise UsageError(f"a state's name must be a word that does not begin with $: {name!r}")
    shared_tree, shared = encode(dict(state.shared), prefix="shared")
    own_tree, own = encode(dict(state.own), prefix=f"rank-{rank:05d}")
    assert isinstance(shared_tree, dict)
    assert isinstance(own_tree, dict)
    writers: Mapping[str, int] = dict.fromkeys(shared, 0)
    if world_size > 1:
        sizes_bytes = {key: one.nbytes for key, one in shared.items() if not is_dtensor(one)}
        writers = owners(sizes_bytes, world_size)
    shards: list[Shard | None] = []
    wholes: list[Whole] = []
    for key, one in shared.items():
        shape = tuple(one.shape)
        if is_dtensor(one):
            shards.append(_shard_of_dtensor(key, one))
            wholes.append((key, shape, one.dtype, None))
            continue
        if writers[key] == rank:
            shards.append(Shard(key, shape, (0,) * len(shape), one))
        wholes.append((key, shape, one.dtype, writers[key]))
    shards += [_own_shard(key, one) for key, one in own.items()]
    return WritePlan(
        rank=rank,
        world_size=world_size,
        shared=shared_tree,
        own=own_tree,
        shards=tuple(one for one in shards if one is not None),
        state_bytes=_bytes(shared) + world_size * _bytes(own),
        wholes=tuple(wholes),
    )


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


@contextmanager
def without_gc() -> Iterator[None]:
    """Without the collector of cycles: a save or a load makes ten objects for every tensor, none of
    them in a cycle, and walking over all objects of a process again and again meanwhile takes
    longer than to copy 5,000 small tensors. Not for longer than Python works on these objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _own_shard(key: str, tensor: torch.Tensor) -> Shard:
    if is_dtensor(tensor):
        raise UnsavableState(
            f"{key} is a DTensor in what is one rank's own; tensors that the ranks share belong to "
            "the state that they have in common: register the object that holds it"
        )
    return Shard(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def _shard_of_dtensor(key: str, tensor: Any) -> Shard | None:
    """The part that this rank writes, if any."""
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
        return Shard(key, tuple(tensor.shape), (0,) * tensor.dim(), local.new_empty(tensor.shape))
    offsets, sizes = box_of(tensor)
    assert sizes == tuple(local.shape), f"{key}: {sizes}, {local.shape}"
    return Shard(key, tuple(tensor.shape), offsets, local)


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
