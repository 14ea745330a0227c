"""What each rank writes of a state. Pure: the ranks do not communicate.

    a tensor of ``own``               its rank
    a plain tensor of ``shared``      one rank: large ones are distributed by size, small: rank 0
    a DTensor of ``shared``           each rank its shard; of replicas, the first one

What is frozen has a file of its own, which later checkpoints link.

Every rank computes this from keys, shapes and types, which are the same everywhere; the ranks
compare its ``digest`` to be sure.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from hydroslurm.checkpoint.tensor_file import (
    DTYPE_NAMES,
    Chunk,
    Laid,
    frozen_part,
    is_frozen_part,
    lay_out,
)
from hydroslurm.checkpoint.tree import JsonValue, dtensors_in, encode
from hydroslurm.core.decoding import Count
from hydroslurm.errors import UnsavableState, UsageError

LEAST_DIVIDED_BYTES = 64 * 1024
"""A plain tensor of at least this size is taken to be a replica, bit for bit the same on all ranks,
like parameters and optimizer states under DDP. Smaller ones are rank 0's: the BatchNorm statistics
of DDP ranks differ, and rank 0's are the ones that torch.save would have kept."""

TALLY_MODULUS = 2**61 - 1
"""A prime, so that a number of values times its weight is never nothing."""


@dataclass(frozen=True)
class State:
    """What is saved, by name: what all ranks share, and this rank's own.

    Attributes:
        frozen: where in memory the shared tensors are (``data_ptr()``) that no optimizer changes.
            One that has changed after all is saved as any other.
    """

    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    frozen: Collection[int] = field(default=(), kw_only=True)


class SharedTensor(NamedTuple):
    """A tensor that all ranks share.

    Attributes:
        dtype: its name without ``torch.``.
        writer: the rank that writes it; None for one that the ranks write in pieces. One that is
            frozen has the number of that rank's file of those (``tensor_file.frozen_part``).
    """

    shape: tuple[Count, ...]
    dtype: str
    writer: int | None


@dataclass(frozen=True)
class WritePlan:
    """What one rank has to write of a state.

    Attributes:
        pieces: the tensors, or parts of them, that this rank writes: of what is shared, then own.
        tensors: one for each piece; the caller's own memory, not a copy.
        frozen_pieces, frozen: the same of what is frozen; ``frozen`` is None where it is stored,
            and this is a copy of the rest.
        shared: the state that all ranks share, without tensors; only rank 0 writes it.
        own: this rank's own state, without tensors.
        shared_tensors: every tensor that the ranks share, by key.
        whole_bytes: of the state of all ranks, assuming that each has as much of its own.
        frozen_bytes: of it, what is frozen.
        fingerprint: of ``frozen`` (``frozen.fingerprint``); empty as long as nobody has asked.
        is_stored: this rank need not write what is frozen: it has none, or there are files of it.
    """

    rank: int
    pieces: tuple[Chunk, ...]
    tensors: tuple[torch.Tensor, ...]
    frozen_pieces: tuple[Chunk, ...]
    frozen: tuple[torch.Tensor, ...] | None
    shared: dict[str, JsonValue]
    own: dict[str, JsonValue]
    shared_tensors: dict[str, SharedTensor]
    whole_bytes: int
    frozen_bytes: int
    fingerprint: str = ""
    is_stored: bool = False

    @property
    def state_bytes(self) -> int:
        """Of the state of all ranks, without what is stored already."""
        return self.whole_bytes - (self.frozen_bytes if self.is_stored else 0)

    @cached_property
    def laid(self) -> Laid:
        """How the pieces lie in this rank's file."""
        return lay_out(self.pieces, rank=self.rank)

    @cached_property
    def laid_frozen(self) -> Laid:
        """How those of what is frozen lie in theirs."""
        return lay_out(self.frozen_pieces, rank=self.rank)

    @property
    def digest(self) -> str:
        """Equal on all ranks if they have the same tensors."""
        lines = sorted(
            f"{key} {one.shape} {one.dtype} {_kind_of(one.writer)}"
            for key, one in self.shared_tensors.items()
        )
        return f"{len(lines)} tensors, {zlib.crc32(chr(10).join(lines).encode()):08x}"

    @property
    def tally(self) -> int:
        """Of the values of shared tensors that this rank writes. Those of all ranks together are
        :attr:`whole_tally` if they write every value once."""
        pieces = (*self.pieces, *self.frozen_pieces)
        return tally_of(
            (one.key, math.prod(one.sizes)) for one in pieces if one.key in self.shared_tensors
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
    own_tree, own = encode(dict(state.own), prefix=f"rank-{rank:05d}")
    shared_tree, shared = encode(dict(state.shared), prefix="shared")
    assert isinstance(own_tree, dict)
    assert isinstance(shared_tree, dict)
    if odd := dtensors_in(own):
        raise UnsavableState(
            f"{min(odd)} is a DTensor in what is one rank's own; tensors that the ranks share "
            "belong to the state that they have in common: register the object that holds it"
        )
    distributed = dtensors_in(shared)
    still = _frozen_keys(shared, distributed, frozenset(state.frozen))
    plain = {key: one.nbytes for key, one in shared.items() if key not in distributed}
    writers = _writers(plain, still, world_size)
    mine = (rank, frozen_part(rank)) if still else (rank,)
    pieces: dict[bool, list[Chunk]] = {False: [], True: []}  # whether it is frozen
    tensors: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    shared_tensors, frozen_bytes = dict[str, SharedTensor](), 0
    for key, one in shared.items():
        writer, is_frozen = writers.get(key), key in still
        part: tuple[tuple[int, ...], torch.Tensor] | None = None
        if key in distributed:
            part = _part_of_dtensor(key, one)
        elif writer in mine:
            part = (0,) * one.dim(), one
        shape = tuple(one.shape)
        shared_tensors[key] = SharedTensor(shape, DTYPE_NAMES[one.dtype], writer)
        frozen_bytes += size_bytes(one) if is_frozen else 0
        if part is not None:
            offsets, tensor = part
            pieces[is_frozen].append(_piece(key, shape, offsets, tensor))
            tensors[is_frozen].append(tensor)
    return WritePlan(
        rank=rank,
        pieces=(
            *pieces[False],
            *(_piece(key, tuple(one.shape), (0,) * one.dim(), one) for key, one in own.items()),
        ),
        tensors=(*tensors[False], *own.values()),
        frozen_pieces=tuple(pieces[True]),
        frozen=tuple(tensors[True]),
        shared=shared_tree,
        own=own_tree,
        shared_tensors=shared_tensors,
        whole_bytes=sum(map(size_bytes, shared.values()))
        + world_size * sum(map(size_bytes, own.values())),
        frozen_bytes=frozen_bytes,
    )


def _frozen_keys(
    shared: Mapping[str, torch.Tensor], distributed: Collection[str], frozen: Collection[int]
) -> set[str]:
    """The keys of what is frozen. Small ones are not worth it, and without memory there is no
    address."""
    found = set[str]()
    for key, one in shared.items() if frozen else ():
        local = one.to_local() if key in distributed else one  # type: ignore[attr-defined]
        if local.nbytes >= LEAST_DIVIDED_BYTES and local.data_ptr() in frozen:
            found.add(key)
    return found


def _writers(
    sizes_bytes: Mapping[str, int], still: Collection[str], world_size: int
) -> dict[str, int]:
    """Key of a plain tensor -> its writer. What is frozen is distributed apart: most saves do not
    write it."""
    trained = {key: size for key, size in sizes_bytes.items() if key not in still}
    of_still = {key: size for key, size in sizes_bytes.items() if key in still}
    return owners(trained, world_size) | {
        key: frozen_part(rank) for key, rank in owners(of_still, world_size).items()
    }


def owners(sizes_bytes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Key -> the rank that writes this plain tensor: the largest first, each to the rank that has
    the least so far."""
    if world_size == 1:
        return dict.fromkeys(sizes_bytes, 0)
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
    key: str, shape: tuple[int, ...], offsets: tuple[int, ...], tensor: torch.Tensor
) -> Chunk:
    return Chunk(key, shape, DTYPE_NAMES[tensor.dtype], offsets, tuple(tensor.shape))


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


def size_bytes(tensor: torch.Tensor) -> int:
    """Of the values of a tensor; of a DTensor, of the whole."""
    return tensor.numel() * tensor.element_size()


def tally_of(values: Iterable[tuple[str, int]]) -> int:
    """A sum over keys and the numbers of values that there are of each. Every key has its own
    weight: what one has too many does not make up for what another one lacks."""
    return sum((zlib.crc32(key.encode()) | 1) * number for key, number in values) % TALLY_MODULUS


def _kind_of(writer: int | None) -> str:
    """For :attr:`WritePlan.digest`: how a tensor is written, whoever does it."""
    if writer is None:
        return "in pieces"
    return "frozen" if is_frozen_part(writer) else "whole"
