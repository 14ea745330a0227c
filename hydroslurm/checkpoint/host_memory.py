"""Host memory: the bytes of tensors, and pages that are there before they are filled."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch

GATHER_BYTES = 1 << 20
"""Small tensors are gathered into pieces of at most this size: a file is written in few calls."""

SMALL_BYTES = 256 << 10
"""Larger tensors are not gathered, which would copy them once more."""

_LEAST_POPULATED_BYTES = 64 << 10
"""For less than this a call takes as long as the faults."""

_MADV_POPULATE_WRITE = 23
"""linux/include/uapi/asm-generic/mman-common.h. Python's mmap does not have it."""


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
