"""Fresh host memory: in huge pages, and its pages before they are written.

The kernel clears a page the first time that it is touched, and one of 2 MiB takes it a fifth of the
time of 512 of 4 KiB. It has to be told before anything in those 2 MiB was touched: an allocator's
own bytes in between are enough to get small pages.

Not so in a guest that reports its free memory to its host: see :func:`is_reported`.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from contextlib import suppress
from pathlib import Path

import torch

_HUGE_BYTES = 4 << 20
"""For less than this it makes no difference."""

_LEAST_POPULATED_BYTES = 64 << 10
"""For less than this a call takes as long as the faults."""

_MADV_POPULATE_WRITE = 23
"""linux/include/uapi/asm-generic/mman-common.h. Python's mmap does not have it."""

_BALLOONS = Path("/sys/bus/virtio/drivers/virtio_balloon")
_REPORTING_BIT = 5
"""VIRTIO_BALLOON_F_REPORTING; linux/include/uapi/linux/virtio_balloon.h."""


def map_pages(wanted_bytes: int, *, inherited: bool) -> mmap.mmap:
    """Private memory.

    Args:
        inherited: whether forked children have it too. Then all of its pages are copy-on-write from
            a fork on.
    """
    pages = mmap.mmap(-1, wanted_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    huge = () if is_reported() else ("MADV_HUGEPAGE",)
    for advice in (*huge, *(() if inherited else ("MADV_DONTFORK",))):
        with suppress(AttributeError, OSError):
            # advice only: a kernel without it gives plain pages
            pages.madvise(getattr(mmap, advice))
    return pages


def populate(memory: memoryview) -> bool:
    """Have real pages put behind memory that is filled next, in one call and without changing what
    is in it: with a fault for each page it takes half as long again. Releases the GIL.

    Returns:
        Whether that was done. Not of a little memory; not by a kernel before 5.14; not where memory
        is away for now. Who fills it meets the faults then.
    """
    if len(memory) < _LEAST_POPULATED_BYTES:
        return False
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + len(memory) - begin
    return bool(_libc().madvise(begin, length, _MADV_POPULATE_WRITE) == 0)


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """For a large tensor on the CPU that nothing was written to yet."""
    size_bytes = tensor.nbytes
    if size_bytes < _HUGE_BYTES or is_reported():
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + size_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(AttributeError, OSError, ValueError):
        _libc().madvise(begin, length, mmap.MADV_HUGEPAGE)


@functools.cache
def is_reported(balloons: Path = _BALLOONS) -> bool:
    """Whether the host takes free memory back (virtio-balloon's free page reporting).

    It takes blocks of at least 2 MiB, which are what huge pages are made of, and has to find and
    clear each of them anew: loading then took 2.5 times as much of the processor as with small
    pages, which come from blocks that the guest has kept.
    """
    for features in balloons.glob("virtio*/features"):
        with suppress(OSError):
            if features.read_bytes()[_REPORTING_BIT : _REPORTING_BIT + 1] == b"1":
                return True
    return False


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
