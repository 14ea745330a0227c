"""The bytes of tensors on the CPU.

Calling torch, or making a view, for one tensor takes about as long as copying 10 KB, and many
tensors are smaller. Those are copied by their addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

import torch

GATHER_BYTES = 1 << 20
"""Small tensors are gathered into pieces of this size, which are in the processor's cache when they
are checksummed and written."""

SMALL_BYTES = 256 << 10
"""A smaller tensor is copied while the GIL is held, for 20 us at the most. To give it up and take
it back for each of thousands can take 5 ms each time, if another thread computes."""

# PyDLL: calls hold the GIL
copy_raw = ctypes.PyDLL(None).memmove
"""To an address, from an address, so many bytes."""
copy_raw.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
copy_raw.restype = None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values are ``nbytes`` bytes from ``data_ptr()`` on, in C order."""
    return tensor.is_cpu and tensor.is_contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, in use for as long as the view lives."""
    try:
        array = tensor.numpy()
    except (TypeError, RuntimeError):  # a type that numpy has not, or needs a gradient
        array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array.reshape(-1)).cast("B")  # type: ignore[arg-type]


def packed(
    tensors: Iterable[torch.Tensor], *, gather_bytes: int = GATHER_BYTES
) -> Iterator[memoryview]:
    """The values of tensors, one after the other, in C order; each piece is valid until the next
    one is requested. Of small tensors up to ``gather_bytes`` are in one piece."""
    memory = bytearray(gather_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    gathered, used = memoryview(memory), 0
    for tensor in tensors:
        one = tensor if is_plain(tensor) else tensor.detach().cpu().contiguous()
        size_bytes = one.nbytes
        if used and used + size_bytes > gather_bytes:
            yield gathered[:used]
            used = 0
        if size_bytes >= min(SMALL_BYTES, gather_bytes):
            if used:
                yield gathered[:used]
                used = 0
            yield bytes_of(one)
        else:
            copy_raw(address + used, one.data_ptr(), size_bytes)
            used += size_bytes
    if used:
        yield gathered[:used]
