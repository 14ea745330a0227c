"""Host memory: the bytes of tensors, pages that are there before they are filled, and a copy of the
training state, which is reused from save to save.

The training stalls for this copy only; a background thread writes it. Fresh pages cost more than
the copy itself, so the memory is kept, and can be allocated and touched in advance
(:meth:`Staging.reserve`). So are the tensors that view it, while the state keeps its shapes.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from hydroslurm.checkpoint.write_plan import WritePlan, size_bytes
from hydroslurm.core.memory import Room, room
from hydroslurm.core.threads import thread

GATHER_BYTES = 1 << 20
"""Small tensors are gathered into pieces of at most this size: a file is written in few calls."""

SMALL_BYTES = 256 << 10
"""Larger tensors are not gathered, which would copy them once more."""

_LEAST_POPULATED_BYTES = 64 << 10
"""For less than this a call takes as long as the faults."""

_MADV_POPULATE_WRITE = 23
"""linux/include/uapi/asm-generic/mman-common.h. Python's mmap does not have it."""

CHUNK_BYTES = 256 * 2**20
"""Size of one piece of staging memory. A power of two: torch rounds pinned memory up to the next
one, so that one large piece could take twice what it holds. A larger tensor gets its own piece."""

_TOUCH_BYTES = 4 * 2**20
"""What is touched in one call, for 0.5 ms, while nobody else of the process may map memory."""

_ALIGN_BYTES = 64
_SLACK_BYTES = 2**16


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, in use for as long as the view lives."""
    if not tensor.numel():
        return memoryview(b"")
    array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]


def packed(tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """The values of tensors, one after the other, in C order; each piece is valid until the next
    one is requested."""
    gathered, used = memoryview(bytearray(GATHER_BYTES)), 0
    for tensor in tensors:
        data = bytes_of(tensor.detach().cpu().contiguous())
        is_small = len(data) <= SMALL_BYTES
        if used and (not is_small or used + len(data) > GATHER_BYTES):
            yield gathered[:used]
            used = 0
        if is_small:
            gathered[used : used + len(data)] = data
            used += len(data)
        else:
            yield data
    if used:
        yield gathered[:used]


def map_pages(wanted_bytes: int) -> mmap.mmap:
    """Private memory that forked children do not have: inherited by one, such as a DataLoader
    worker, every page would be copied at the next write to it."""
    pages = mmap.mmap(-1, wanted_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # advice only
        pages.madvise(mmap.MADV_DONTFORK)
    return pages


def populate(memory: memoryview) -> bool:
    """Have real pages put behind memory that is filled next, in one call and without changing what
    is in it: with a fault for each page it takes half as long again. Releases the GIL.

    Returns:
        Whether that was done. Not of a little memory; not by a kernel before 5.14. Who fills it
        meets the faults then.
    """
    if len(memory) < _LEAST_POPULATED_BYTES:
        return False
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + len(memory) - begin
    return bool(_libc().madvise(begin, length, _MADV_POPULATE_WRITE) == 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


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
        self._arenas = _arenas()
        self._forms: list[Any] = []
        self._copies: tuple[torch.Tensor, ...] | None = None
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
        return sum(arena.capacity_bytes for arena in self._arenas.values())

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
                self._make_copies(plan)
                self._arenas[False].touch()

        self._reserving = thread(reserve, name="hydroslurm-reserve", daemon=False)
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
        copies = self._copies if self._forms == _forms(plan) else None
        if copies is None:
            self._copies = None
            if not self._may_hold(plan):
                self._arenas = _arenas()
                return None
            copies = self._make_copies(plan)
        frozen = None if plan.is_stored else self._copy_of_frozen(plan)
        if frozen is None and not plan.is_stored:
            return None
        _fill(copies, plan.tensors)
        return replace(plan, tensors=copies, frozen=frozen)

    def _copy_of_frozen(self, plan: WritePlan) -> tuple[torch.Tensor, ...] | None:
        """In memory of its own, which is not kept: it is written once. None if there is none."""
        tensors, self._lacking = plan.frozen or (), ""
        wanted_bytes, room = sum(map(size_bytes, tensors)), self._room()
        if tensors and wanted_bytes > room.free_bytes:
            self._lacking = self._why_not(wanted_bytes, room)
            return None
        return tuple(torch.empty_like(one, device="cpu").copy_(one) for one in tensors)

    def _make_copies(self, plan: WritePlan) -> tuple[torch.Tensor, ...]:
        memory = {
            on_cuda: iter(arena.hand_out([one for one in plan.tensors if one.is_cuda is on_cuda]))
            for on_cuda, arena in self._arenas.items()
        }
        copies = tuple(next(memory[one.is_cuda]) for one in plan.tensors)
        self._forms, self._copies = _forms(plan), copies
        return copies

    def _may_hold(self, plan: WritePlan) -> bool:
        """Whether there is memory for a copy. A refusal is final: what was too much after one step
        may seem to fit a moment later, and get the job killed."""
        more_bytes = sum(
            arena.lacks(sum(size_bytes(one) for one in plan.tensors if one.is_cuda is on_cuda))
            for on_cuda, arena in self._arenas.items()
        )
        if more_bytes == 0 or more_bytes <= (room := self._room()).free_bytes:
            return True
        self._refused = self._why_not(more_bytes, room)
        return False

    def _why_not(self, more_bytes: int, room: Room) -> str:
        return (
            f"a copy of the state in memory would take {more_bytes / 1e6:,.0f} MB more, and "
            f"{room.free_bytes / 1e6:,.0f} MB may be taken ({room.message})"
        )


def _fill(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for is_cuda in (False, True):
            pairs = [
                (to, of) for to, of in zip(copies, tensors, strict=True) if of.is_cuda is is_cuda
            ]
            if pairs:
                to_these, of_these = map(list, zip(*pairs, strict=True))
                torch._foreach_copy_(to_these, of_these, non_blocking=is_cuda)
    for device in {one.device for one in tensors if one.is_cuda}:
        torch.cuda.synchronize(device)


def _forms(plan: WritePlan) -> list[Any]:
    """What has to be the same for tensors to be copied into the memory of others."""
    return [(one.shape, one.stride(), one.dtype, one.is_cuda) for one in plan.tensors]


class _Arena:
    """Pieces of memory, which are kept and handed out again."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._pieces: list[torch.Tensor] = []

    @property
    def capacity_bytes(self) -> int:
        return sum(map(len, self._pieces))

    def lacks(self, expected_bytes: int) -> int:
        """How much more must be allocated for so many bytes."""
        if expected_bytes <= self.capacity_bytes:
            return 0
        return _with_slack(expected_bytes) - self.capacity_bytes

    def hand_out(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Uninitialised memory of each tensor's dtype and shape, dense, in its order of dimensions:
        if the tensor is dense, copying is one memcpy. What was handed out before is void."""
        left_bytes = _with_slack(sum(map(size_bytes, tensors)))
        used, found = [0] * len(self._pieces), []
        for tensor in tensors:
            wanted_bytes = size_bytes(tensor)
            if wanted_bytes == 0:
                found.append(torch.empty(tensor.shape, dtype=tensor.dtype))
                continue
            rooms = (
                n for n, piece in enumerate(self._pieces) if used[n] + wanted_bytes <= len(piece)
            )
            number = next(rooms, len(used))
            if number == len(used):
                self._pieces.append(self._new(max(wanted_bytes, min(CHUNK_BYTES, left_bytes))))
                used.append(0)
            storage, start = self._pieces[number].untyped_storage(), used[number]
            strides = torch.empty_like(tensor, device="meta").stride()
            copy = torch.empty(0, dtype=tensor.dtype)
            found.append(copy.set_(storage, start // tensor.itemsize, tensor.shape, strides))
            # aligned for every dtype, and on a cache line of its own
            used[number] = start + -(-wanted_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
            left_bytes -= wanted_bytes
        return found

    def touch(self) -> None:
        """Make the kernel back the memory with real pages; overwrites the contents."""
        for piece in self._pieces:
            for start in range(0, len(piece), _TOUCH_BYTES):
                part = piece[start : start + _TOUCH_BYTES]
                if not populate(bytes_of(part)):
                    part[:: mmap.PAGESIZE].zero_()

    def _new(self, wanted_bytes: int) -> torch.Tensor:
        if self._pinned:
            return torch.empty(wanted_bytes, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(map_pages(wanted_bytes), dtype=torch.uint8)


def _arenas() -> dict[bool, _Arena]:
    """Whether tensors are on an accelerator -> the memory of their copies."""
    return {is_cuda: _Arena(pinned=is_cuda) for is_cuda in (False, True)}


def _with_slack(expected_bytes: int) -> int:
    """With room for what alignment and the ends of pieces may waste."""
    return expected_bytes + expected_bytes // 16 + _SLACK_BYTES
