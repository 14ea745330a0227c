"""A copy of the training state in host memory, which is reused from save to save.

The training stalls for this copy only; a background thread writes it. Fresh pages cost more than
the copy itself, so the memory is kept, and can be allocated and touched in advance
(:meth:`Staging.reserve`). So are the tensors that view it, while the state keeps its shapes.
"""

from __future__ import annotations

import mmap
import threading
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import compress

import torch

from hydroslurm.checkpoint.pages import map_pages, populate
from hydroslurm.checkpoint.tensor_bytes import SMALL_BYTES, copy_raw, is_plain
from hydroslurm.checkpoint.write_plan import Layout, WritePlan
from hydroslurm.core.memory import Room, room

CHUNK_BYTES = 256 * 2**20
"""Size of one piece of staging memory. A power of two: torch rounds pinned memory up to the next
one, so that one large piece could take twice what it holds. A larger tensor gets its own piece."""

_TOUCH_BYTES = 4 * 2**20
"""What is touched in one call, for 0.5 ms, while nobody else of the process may map memory."""

_ALIGN_BYTES = 64
_SLACK_BYTES = 2**16


class Staging:
    """Copies of a state in host memory; each overwrites the last unless a save is still reading it.
    For the training thread."""

    def __init__(
        self,
        *,
        exempt: Callable[[], AbstractContextManager[None]] = nullcontext,
        room: Callable[[], Room] = room,
    ) -> None:
        """
        Args:
            exempt: makes the context in which no pause holds a thread.
            room: says how much memory copies may take.
        """
        self._exempt = exempt
        self._room = room
        self._pageable, self._pinned = _Arena(pinned=False), _Arena(pinned=True)
        self._copies: _Copies | None = None
        self._reserving: threading.Thread | None = None
        self._refused = ""
        self._lacking = ""

    @property
    def refused(self) -> str:
        """Why there is no memory for copies, for people, or was none for the last one of what is
        frozen; empty if there is."""
        return self._refused or self._lacking

    @property
    def reserved_bytes(self) -> int:
        """Host memory that is held."""
        return self._pageable.capacity_bytes + self._pinned.capacity_bytes

    def reserve(self, plan: WritePlan) -> None:
        """Allocate the memory for copies like this one in the background, so that the first copy is
        as fast as the others. Does so once, and not if it would be too much.

        Reads sizes only, no tensor's content.
        """
        # asked before the thread allocates: the ranks of a node get here together, and one that
        # finds another's memory already taken would think there is less
        if self._reserving is not None or not self._may_hold(plan):
            return

        def reserve() -> None:
            with self._exempt():
                self._copies = self._make_copies(plan)
                self._pageable.touch()

        self._reserving = threading.Thread(target=reserve, name="hydroslurm-reserve", daemon=False)
        self._reserving.start()

    def join(self) -> None:
        """Wait until the memory is allocated."""
        if self._reserving is not None:
            self._reserving.join()

    def copy(self, plan: WritePlan) -> WritePlan | None:
        """Copy what this rank writes, so that the caller may change the state at once. None if
        there is no memory for a copy (see :attr:`refused`).

        Nobody may be reading the last copy any more. Tensors of an accelerator are copied into
        pinned memory.
        """
        self.join()  # touching the rest ahead of the copy takes half as long as touching it in it
        if self._refused:
            return None
        copies = self._copies
        if copies is None or not copies.are_of(plan.layout):
            self._copies = None
            if not self._may_hold(plan):
                self._pageable, self._pinned = _Arena(pinned=False), _Arena(pinned=True)
                return None
            copies = self._copies = self._make_copies(plan)
        frozen = None if plan.is_stored else self._copy_of_frozen(plan)
        if frozen is None and not plan.is_stored:
            return None
        copies.fill(plan.tensors)
        return replace(plan, tensors=copies.tensors, frozen=frozen)

    def _copy_of_frozen(self, plan: WritePlan) -> tuple[torch.Tensor, ...] | None:
        """In memory of its own, which is not kept: it is written once. None if there is none."""
        tensors, self._lacking = plan.frozen or (), ""
        wanted_bytes, room = sum(map(size_bytes, tensors)), self._room()
        if tensors and wanted_bytes > room.free_bytes:
            self._lacking = self._why_not(wanted_bytes, room)
            return None
        return tuple(torch.empty_like(one, device="cpu").copy_(one) for one in tensors)

    def _make_copies(self, plan: WritePlan) -> _Copies:
        sizes = _sizes(plan)
        self._pageable.rewind(sizes[False])
        self._pinned.rewind(sizes[True])
        return _Copies(plan.layout, tuple(self._arena(one).like(one) for one in plan.tensors))

    def _may_hold(self, plan: WritePlan) -> bool:
        """Whether there is memory for a copy. A refusal is final: what was too much after one step
        may seem to fit a moment later, and get the job killed."""
        sizes = _sizes(plan)
        more_bytes = self._pageable.lacks(sizes[False]) + self._pinned.lacks(sizes[True])
        if more_bytes == 0:
            return True
        room = self._room()
        if more_bytes <= room.free_bytes:
            return True
        self._refused = self._why_not(more_bytes, room)
        return False

    def _why_not(self, more_bytes: int, room: Room) -> str:
        return (
            f"a copy of the state in memory would take {more_bytes / 1e6:,.0f} MB more, and "
            f"{room.free_bytes / 1e6:,.0f} MB may be taken ({room.message})"
        )

    def _arena(self, tensor: torch.Tensor) -> _Arena:
        return self._pinned if tensor.is_cuda else self._pageable


class _Copies:
    """Tensors in staging memory, for a state of one layout."""

    def __init__(self, layout: Layout, tensors: tuple[torch.Tensor, ...]) -> None:
        self.tensors = tensors
        self._layout = layout
        pairs = tuple(zip(layout.pieces, tensors, strict=True))
        on_cuda = [piece.on_cuda for piece, _ in pairs]
        small = [  # and whose values lie there as they lie here, one after the other
            piece.size_bytes < SMALL_BYTES
            and not piece.on_cuda
            and piece.strides == copy.stride()
            and is_plain(copy)
            for piece, copy in pairs
        ]
        large = [not one and not two for one, two in zip(on_cuda, small, strict=True)]
        self._small, self._large, self._on_cuda = small, large, on_cuda
        self._addresses = array("Q", (one.data_ptr() for one in compress(tensors, small)))
        self._sizes = array("Q", (one.nbytes for one in compress(tensors, small)))

    def are_of(self, layout: Layout) -> bool:
        """Whether a state of this layout can be copied into them."""
        return layout is self._layout or layout.pieces == self._layout.pieces

    def fill(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Small ones by their addresses: calling torch takes longer than copying them, even if it
        is called once for all. The others in one call for those of a kind."""
        sources = map(torch.Tensor.data_ptr, compress(tensors, self._small))
        for to, of, wanted_bytes in zip(self._addresses, sources, self._sizes, strict=True):
            copy_raw(to, of, wanted_bytes)
        with torch.no_grad():
            for of_kind, is_cuda in ((self._large, False), (self._on_cuda, True)):
                to_these = list(compress(self.tensors, of_kind))
                of_these = list(compress(tensors, of_kind))
                if to_these:
                    torch._foreach_copy_(to_these, of_these, non_blocking=is_cuda)
        for device in {one.device for one in compress(tensors, self._on_cuda)}:
            torch.cuda.synchronize(device)


def size_bytes(tensor: torch.Tensor) -> int:
    """Of the values of a tensor."""
    return tensor.numel() * tensor.element_size()


def _sizes(plan: WritePlan) -> dict[bool, int]:
    """On an accelerator or not -> bytes."""
    sizes = {True: 0, False: 0}
    for piece in plan.layout.pieces:
        sizes[piece.on_cuda] += piece.size_bytes
    return sizes


class _Arena:
    """Pieces of memory, handed out from the beginning again after every ``rewind``."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._pieces: list[memoryview] = []
        self._storages: list[torch.UntypedStorage] = []
        self._used: list[int] = []
        self._expected_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        return sum(len(piece) for piece in self._pieces)

    def rewind(self, expected_bytes: int) -> None:
        """Begin again; so many bytes will be asked for, plus alignment."""
        self._used = [0] * len(self._pieces)
        self._expected_bytes = expected_bytes

    def lacks(self, expected_bytes: int) -> int:
        """How much more must be allocated for so many bytes."""
        if expected_bytes <= self.capacity_bytes:
            return 0
        return _with_slack(expected_bytes) - self.capacity_bytes

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory of the tensor's dtype and shape, dense, in its order of dimensions:
        if the tensor is dense, copying is one memcpy."""
        wanted_bytes = size_bytes(tensor)
        if wanted_bytes == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        piece, start = self._take(wanted_bytes)
        strides = (
            tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
        ).stride()
        # set_ instead of a view or frombuffer: with an object less to keep for each of thousands
        return torch.empty(0, dtype=tensor.dtype).set_(
            self._storages[piece], start // tensor.itemsize, tensor.shape, strides
        )

    def touch(self) -> None:
        """Make the kernel back the memory with real pages; overwrites the contents."""
        for piece in self._pieces:
            for start in range(0, len(piece), _TOUCH_BYTES):
                part = piece[start : start + _TOUCH_BYTES]
                if not populate(part):
                    torch.frombuffer(part, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()

    def _take(self, wanted_bytes: int) -> tuple[int, int]:
        """The number of a piece, and where in it so much room begins."""
        for index, piece in enumerate(self._pieces):
            start = self._used[index]
            if start + wanted_bytes <= len(piece):
                break
        else:
            index, start, piece = len(self._pieces), 0, self._new(wanted_bytes)
            self._pieces.append(piece)
            self._storages.append(torch.frombuffer(piece, dtype=torch.uint8).untyped_storage())
            self._used.append(0)
        # aligned for every dtype, and on a cache line of its own
        self._used[index] = start + -(-wanted_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self._expected_bytes -= wanted_bytes
        return index, start

    def _new(self, wanted_bytes: int) -> memoryview:
        wanted_bytes = max(wanted_bytes, min(CHUNK_BYTES, _with_slack(self._expected_bytes)))
        if self._pinned:
            pinned = torch.empty(wanted_bytes, dtype=torch.uint8, pin_memory=True)
            return memoryview(pinned.numpy())  # type: ignore[arg-type]
        # Inherited by a child (a DataLoader worker), every page would become copy-on-write, and the
        # next copy would stall the training as long as the first.
        return memoryview(map_pages(wanted_bytes, inherited=False))


def _with_slack(expected_bytes: int) -> int:
    """With room for what alignment and the ends of pieces may waste."""
    return expected_bytes + expected_bytes // 16 + _SLACK_BYTES
