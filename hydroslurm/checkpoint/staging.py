"""A copy of the training state in host memory that is kept from save to save.

The training stands still for this copy only; a background thread writes the copy. What the copy
costs is the memory traffic, provided the memory is there: touching fresh pages takes five to twenty
times as long as the copy itself, so that the memory is kept, and can be had in advance
(:meth:`Staging.reserve`).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import overload

import torch

from hydroslurm.checkpoint.skeleton import join, split
from hydroslurm.checkpoint.store import State
from hydroslurm.checkpoint.write_plan import WritePlan

CHUNK_BYTES = 256 * 2**20
"""Size of one piece of staging memory. A power of two: torch rounds pinned memory up to the next
one, and a single large piece could take twice what it holds. A larger tensor gets a piece of its
own."""

_ALIGN_BYTES = 64
_SLACK_BYTES = 2**16


class NoMemory(Exception):
    """The memory for a copy may not be taken; nothing was copied."""


class Staging:
    """Host memory for one copy of a state; the next copy overwrites the last.

    For one thread at a time. What :meth:`copy` returned must not be read any more when it is called
    again: whoever writes a copy to disk is waited for first.
    """

    def __init__(self, *, may_take: Callable[[int], bool] = lambda _: True) -> None:
        """``may_take``: whether so many more bytes may be had; asked before they are."""
        self._may_take = may_take
        self._pageable = _Arena(pinned=False)
        self._pinned = _Arena(pinned=True)
        self._copied_bytes = 0

    @property
    def copied_bytes(self) -> int:
        """The size of the state that was copied last, as in :func:`state_bytes`."""
        return self._copied_bytes

    @property
    def reserved_bytes(self) -> int:
        """Host memory that is held."""
        return self._pageable.capacity_bytes + self._pinned.capacity_bytes

    def may_hold(self, state: State | WritePlan) -> bool:
        """Whether a copy of this state has its place, or may take it.

        Raises:
            UnsavableState: the state holds what cannot be saved.
        """
        return self._may_hold(_sizes(_tensors(state)))

    @overload
    def copy(self, state: State) -> State: ...

    @overload
    def copy(self, state: State | WritePlan) -> State | WritePlan: ...

    def copy(self, state: State | WritePlan) -> State | WritePlan:
        """The state as it is now, in host memory of our own: the caller may change theirs at once.
        Of a portion only what this rank writes.

        Tensors of an accelerator are copied into pinned memory. The same memory seen in two places
        is one tensor in the copy as well. Everything else is what a checkpoint would give back.

        Raises:
            UnsavableState: the state holds what cannot be saved; nothing was copied.
            NoMemory: there is not enough.
        """
        if isinstance(state, WritePlan):
            return self._portion(state)
        shared, shared_tensors = split(dict(state.shared), prefix="shared")
        own, own_tensors = split(dict(state.own), prefix="own")
        self._ask_for([*shared_tensors.values(), *own_tensors.values()])
        copies = self._copies(shared_tensors), self._copies(own_tensors)
        tree = join(shared, copies[0]), join(own, copies[1])
        for device in {tensor.device for tensor in _on_cuda(shared_tensors, own_tensors)}:
            torch.cuda.synchronize(device)
        return State(shared=tree[0], own=tree[1])

    def reserve(self, state: State | WritePlan) -> None:
        """Have the memory for a state like this, so that the first copy is as fast as the others.

        Reads sizes only, no tensor's content; may run in a thread beside the training. Does not ask
        whether it may (see :meth:`may_hold`).
        """
        tensors = _tensors(state)
        self._expect(tensors)
        for tensor in tensors:
            self._arena(tensor).like(tensor)
        self._pageable.touch()

    def _portion(self, portion: WritePlan) -> WritePlan:
        tensors = [piece.tensor for piece in portion.pieces]
        self._ask_for(tensors)
        copies = self._copies({str(at): tensor for at, tensor in enumerate(tensors)})
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self._copied_bytes = portion.state_bytes
        pieces = zip(portion.pieces, copies.values(), strict=True)
        return replace(
            portion, pieces=tuple(replace(piece, tensor=tensor) for piece, tensor in pieces)
        )

    def _ask_for(self, tensors: Collection[torch.Tensor]) -> None:
        if not self._may_hold(_sizes(tensors)):
            raise NoMemory
        self._expect(tensors)

    def _expect(self, tensors: Iterable[torch.Tensor]) -> None:
        sizes = _sizes(tensors)
        self._copied_bytes = sum(sizes.values())
        self._pageable.rewind(sizes[False])
        self._pinned.rewind(sizes[True])

    def _may_hold(self, sizes: Mapping[bool, int]) -> bool:
        more_bytes = self._pageable.lacks(sizes[False]) + self._pinned.lacks(sizes[True])
        return more_bytes == 0 or self._may_take(more_bytes)

    def _copies(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Begins the copies; those from an accelerator may not have ended."""
        with torch.no_grad():
            return {
                key: self._arena(tensor).like(tensor).copy_(tensor, non_blocking=tensor.is_cuda)
                for key, tensor in tensors.items()
            }

    def _arena(self, tensor: torch.Tensor) -> _Arena:
        return self._pinned if tensor.is_cuda else self._pageable


def state_bytes(state: State | WritePlan) -> int:
    """The size of all tensors of a state; memory that is seen twice counts once. Of a portion the
    size of the whole.

    Raises:
        UnsavableState: the state holds what cannot be saved.
    """
    if isinstance(state, WritePlan):
        return state.state_bytes
    return sum(map(size_bytes, _tensors(state)))


def size_bytes(tensor: torch.Tensor) -> int:
    """Of the values of a tensor."""
    return tensor.numel() * tensor.element_size()


def _sizes(tensors: Iterable[torch.Tensor]) -> dict[bool, int]:
    """On an accelerator or not -> bytes."""
    sizes = {True: 0, False: 0}
    for tensor in tensors:
        sizes[tensor.is_cuda] += size_bytes(tensor)
    return sizes


def _tensors(state: State | WritePlan) -> list[torch.Tensor]:
    if isinstance(state, WritePlan):
        return [piece.tensor for piece in state.pieces]
    parts = ((state.shared, "shared"), (state.own, "own"))
    return [
        tensor for tree, prefix in parts for tensor in split(dict(tree), prefix=prefix)[1].values()
    ]


def _on_cuda(*parts: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    return (tensor for part in parts for tensor in part.values() if tensor.is_cuda)


class _Arena:
    """Pieces of memory, handed out from the beginning again after every ``rewind``."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._pieces: list[memoryview] = []
        self._used: list[int] = []
        self._expected_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        return sum(len(piece) for piece in self._pieces)

    def rewind(self, expected_bytes: int) -> None:
        """Begin again; so many bytes will be asked for, alignment aside."""
        self._used = [0] * len(self._pieces)
        self._expected_bytes = expected_bytes

    def lacks(self, expected_bytes: int) -> int:
        """How much more has to be had before so many bytes can be asked for."""
        if expected_bytes <= self.capacity_bytes:
            return 0
        return _with_slack(expected_bytes) - self.capacity_bytes

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory of the tensor's dtype and shape, dense, in its order of dimensions:
        a copy between the two is one memcpy wherever the tensor itself is dense."""
        wanted_bytes = size_bytes(tensor)
        if wanted_bytes == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        # frombuffer gives each its own torch storage. A view into one large storage would be cloned
        # by whoever writes it, because torch.save writes the whole storage behind a view
        flat = torch.frombuffer(self._take(wanted_bytes), dtype=tensor.dtype)
        if tensor.is_contiguous():
            return flat.view(tensor.shape)
        return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())

    def touch(self) -> None:
        """Make the kernel back all of it with real pages. What is in it is lost."""
        for piece in self._pieces:
            torch.frombuffer(piece, dtype=torch.uint8).zero_()

    def _take(self, wanted_bytes: int) -> memoryview:
        for index, piece in enumerate(self._pieces):
            start = self._used[index]
            if start + wanted_bytes <= len(piece):
                break
        else:
            index, start, piece = len(self._pieces), 0, self._new(wanted_bytes)
            self._pieces.append(piece)
            self._used.append(0)
        # the next begins where every dtype may begin, and on a cache line of its own
        self._used[index] = start + -(-wanted_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self._expected_bytes -= wanted_bytes
        return piece[start : start + wanted_bytes]

    def _new(self, wanted_bytes: int) -> memoryview:
        wanted_bytes = max(wanted_bytes, min(CHUNK_BYTES, _with_slack(self._expected_bytes)))
        if self._pinned:
            pinned = torch.empty(wanted_bytes, dtype=torch.uint8, pin_memory=True)
            return memoryview(pinned.numpy())  # type: ignore[arg-type]
        return memoryview(_pages(wanted_bytes))


def _with_slack(expected_bytes: int) -> int:
    """With what alignment and the ends of pieces may waste."""
    return expected_bytes + expected_bytes // 16 + _SLACK_BYTES


def _pages(wanted_bytes: int) -> mmap.mmap:
    """Private memory in huge pages where the kernel gives them, and of this process alone.

    Huge pages: the first copy then takes a fifth of the time. Not inherited by children: a fork (of
    a DataLoader worker) would make every page copy-on-write, and the next copy into it would stall
    the training for as long as the first.
    """
    pages = mmap.mmap(-1, wanted_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        try:
            pages.madvise(getattr(mmap, advice))
        except (AttributeError, OSError):
            pass  # advice only: a kernel without it gives plain pages
    return pages
