"""Host memory whose pages are there before it is filled."""

from __future__ import annotations

import ctypes
import functools
import mmap
from contextlib import suppress

_LEAST_POPULATED_BYTES = 64 << 10
"""For less than this a call takes as long as the faults."""

_MADV_POPULATE_WRITE = 23
"""linux/include/uapi/asm-generic/mman-common.h. Python's mmap does not have it."""


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
