"""Fresh host memory in huge pages.

The kernel clears a page the first time that it is touched, and one of 2 MiB takes it a fifth of the
time of 512 of 4 KiB. It has to be told before anything in those 2 MiB was touched: an allocator's
own bytes in between are enough to get small pages.

Not so in a guest that reports its free memory to its host: see :func:`is_reported`.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from contextlib import suppress
from pathlib import Path

import torch

_HUGE_BYTES = 4 << 20
"""For less than this it makes no difference."""

_GROUP_BYTES = 32 << 20
_LEAST_BYTES = 16 << 10
"""Tensors of at least this size share the pages of a group, which are given back when the last of
them is. What an optimizer keeps of a loaded state while it copies the rest to a device, such as the
number of its steps, is smaller: it must not keep a group."""

_ALIGN_BYTES = 64
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


class TensorMemory:
    """Makes tensors on the CPU that are filled soon, as many as are expected."""

    def __init__(self, expected_bytes: int) -> None:
        self._expected_bytes = expected_bytes if expected_bytes >= _HUGE_BYTES else 0
        self._pages = memoryview(b"")
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As torch.empty does it."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if not self._expected_bytes or not _LEAST_BYTES <= size_bytes <= _GROUP_BYTES // 2:
            found = torch.empty(shape, dtype=dtype)
            advise_huge_pages(found)
            return found
        if self._used + size_bytes > len(self._pages):
            group_bytes = max(size_bytes, min(_GROUP_BYTES, self._expected_bytes))
            self._pages, self._used = memoryview(map_pages(group_bytes, inherited=True)), 0
        begin = self._used
        self._used = -(-(begin + size_bytes) // _ALIGN_BYTES) * _ALIGN_BYTES
        self._expected_bytes -= size_bytes
        flat = torch.frombuffer(self._pages[begin : begin + size_bytes], dtype=dtype)
        return flat.view(shape)


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """For a large tensor on the CPU that nothing was written to yet."""
    size_bytes = tensor.nbytes
    if size_bytes < _HUGE_BYTES or is_reported():
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + size_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(AttributeError, OSError, ValueError):
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


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
    return ctypes.CDLL(None)
