"""The bytes of tensors on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

GATHER_BYTES = 1 << 20
"""Small tensors are gathered into pieces of at most this size: a file is written in few calls."""

SMALL_BYTES = 256 << 10
"""Larger tensors are not gathered, which would copy them once more."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, in use for as long as the view lives."""
    if not tensor.numel():
        return memoryview(b"")
    try:
        array = tensor.numpy()
    except (TypeError, RuntimeError):  # a type that numpy has not, or needs a gradient
        array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array.reshape(-1)).cast("B")  # type: ignore[arg-type]


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
