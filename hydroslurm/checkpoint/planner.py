"""Which rank writes what of a state. Pure: the ranks do not communicate.

    a tensor of ``own``               its rank
    a plain tensor of ``shared``      one rank: large ones are distributed by size, small: rank 0
    a DTensor of ``shared``           each rank its shard; of replicas, the first one

What is frozen has a file of its own, which later checkpoints link.

Every rank computes this from keys, shapes and types, which are the same everywhere; the ranks
compare their ``layout`` to be sure.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from hydroslurm.checkpoint.outline import NoOutlineError, Outline
from hydroslurm.checkpoint.tensor_file import Piece, frozen_part, is_frozen_part
from hydroslurm.checkpoint.tree import JsonValue, encode, is_dtensor
from hydroslurm.checkpoint.write_plan import Layout, State, Whole, WritePlan
from hydroslurm.errors import UnsavableState, UsageError

LEAST_DIVIDED_BYTES = 64 * 1024
"""A plain tensor of at least this size is taken to be a replica, bit for bit the same on all ranks,
like parameters and optimizer states under DDP. Smaller ones are rank 0's: the BatchNorm statistics
of DDP ranks differ, and rank 0's are the ones that torch.save would have kept."""


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
    whole, frozen = dict(state.shared), frozenset(state.frozen)
    if known is not None and (known.rank, known.world_size) == (rank, world_size):
        again = _again(whole, own, known, frozen)
        if again is not None:
            tree, tensors, still = again
            return WritePlan(known, tree, own_tree, tensors, still)
    shared_tree, shared = encode(whole, prefix="shared")
    assert isinstance(shared_tree, dict)
    outline = None
    with suppress(NoOutlineError):
        outline = Outline(whole, shared_tree, prefix="shared")
    layout, tensors, still = _laid_out(
        shared, own, outline, frozen=frozen, rank=rank, world_size=world_size
    )
    if outline is None and known == layout:
        layout = known
    return WritePlan(layout, shared_tree, own_tree, tensors, still)


_Tensors: TypeAlias = "tuple[torch.Tensor, ...]"


def _again(
    whole: Mapping[str, Any],
    own: Mapping[str, torch.Tensor],
    known: Layout,
    frozen: Collection[int],
) -> tuple[dict[str, JsonValue], _Tensors, _Tensors] | None:
    """The tree and the tensors, those that are frozen apart, of a state that is laid out as another
    one was; None if it is not."""
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
    if frozen or known.frozen_numbers:
        now = [number for number, one in enumerate(tensors) if _is_frozen(one, frozen)]
        if now != known.frozen_numbers:
            return None
    still = tuple(tensors[number] for number in known.taken_frozen)
    if len(known.taken) != len(tensors):
        tensors = [tensors[number] for number in known.taken]
    return tree, (*tensors, *own.values()), still


def _laid_out(
    shared: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    outline: Outline | None,
    *,
    frozen: Collection[int],
    rank: int,
    world_size: int,
) -> tuple[Layout, _Tensors, _Tensors]:
    writers = _writers(shared, frozen, world_size)
    same: dict[tuple[int, ...], tuple[int, ...]] = {}  # of thousands of shapes few differ
    mine, still, wholes = _Mine(same), _Mine(same), list[Whole]()
    plain, frozen_bytes = itertools.count(), 0
    for key, one in shared.items():
        shape = tuple(one.shape)
        shape = same.setdefault(shape, shape)
        if is_dtensor(one):
            wholes.append((key, shape, one.dtype, None))
            local_part = one.to_local()  # type: ignore[attr-defined]
            frozen_bytes += _bytes([one]) if _is_frozen(local_part, frozen) else 0
            part = _part_of_dtensor(key, one)
            if part is not None:
                offsets, local = part
                (still if _is_frozen(local, frozen) else mine).add(key, shape, offsets, local)
            continue
        number, writer = next(plain), writers[key]
        frozen_bytes += one.nbytes if is_frozen_part(writer) else 0
        if writer in (rank, frozen_part(rank)):
            taker = mine if writer == rank else still
            taker.add(key, shape, (0,) * len(shape), one)
            taker.taken.append(number)
        wholes.append((key, shape, one.dtype, writer))
    layout = Layout(
        rank=rank,
        world_size=world_size,
        pieces=(*mine.pieces, *(_piece_of_own(key, one) for key, one in own.items())),
        frozen=tuple(still.pieces),
        taken=mine.taken,
        taken_frozen=still.taken,
        wholes=tuple(wholes),
        state_bytes=_bytes(shared.values()) + world_size * _bytes(own.values()),
        frozen_bytes=frozen_bytes,
        outline=outline,
    )
    return layout, (*mine.tensors, *own.values()), tuple(still.tensors)


class _Mine:
    """What a rank writes into one file."""

    def __init__(self, same: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self.pieces: list[Piece] = []
        self.tensors: list[torch.Tensor] = []
        self.taken = array("q")  # a tenth of what a tuple of thousands of numbers takes
        self._same = same

    def add(
        self, key: str, shape: tuple[int, ...], offsets: tuple[int, ...], tensor: torch.Tensor
    ) -> None:
        self.pieces.append(_piece(key, shape, offsets, tensor, self._same))
        self.tensors.append(tensor)


def _writers(
    shared: Mapping[str, torch.Tensor], frozen: Collection[int], world_size: int
) -> dict[str, int]:
    """Key of a plain tensor -> its writer. What is frozen is distributed apart: most saves do not
    write it."""
    sizes_bytes = {key: one.nbytes for key, one in shared.items() if not is_dtensor(one)}
    still = {key for key in sizes_bytes if _is_frozen(shared[key], frozen)} if frozen else set()
    trained = {key: size for key, size in sizes_bytes.items() if key not in still}
    found = owners(trained, world_size)
    of_still = owners({key: sizes_bytes[key] for key in sizes_bytes if key in still}, world_size)
    return found | {key: frozen_part(rank) for key, rank in of_still.items()}


def _is_frozen(tensor: torch.Tensor, frozen: Collection[int]) -> bool:
    """Small ones are not worth it, and without memory there is no address."""
    return bool(frozen) and tensor.nbytes >= LEAST_DIVIDED_BYTES and tensor.data_ptr() in frozen


def plan_of(state: State | WritePlan, *, rank: int, world_size: int) -> WritePlan:
    """What this rank writes of a state, which may have been divided before."""
    if isinstance(state, WritePlan):
        return state
    return divide(state, rank=rank, world_size=world_size)


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


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
