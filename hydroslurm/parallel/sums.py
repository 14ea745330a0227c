"""Sums and copies of gradients in host memory.

In blocks, for the caches, and because PyTorch gives larger ones to further threads where it has
any: those are the training's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def add(
    out: torch.Tensor,
    sources: Sequence[torch.Tensor],
    *,
    accumulate: torch.dtype,
    scale: float = 1.0,
) -> None:
    """``out = scale * sum of the sources``; all of one length.

    Element by element, in the order of the sources and in the accumulation type, rounded once: the
    result of an element depends neither on its place nor on the processor.
    """
    block = _block()
    for to, first, *rest in zip(*(torch.split(one, block) for one in (out, *sources)), strict=True):
        total = to if to.dtype is accumulate else torch.empty_like(to, dtype=accumulate)
        if rest and first.dtype is accumulate:
            torch.add(first, rest.pop(0), out=total)
        else:
            total.copy_(first)
        for one in rest:
            total += one
        if scale != 1.0:
            total *= scale
        if total is not to:
            to.copy_(total)


def copy(out: torch.Tensor, source: torch.Tensor) -> None:
    """Of one length; converted where the types differ."""
    if out.dtype is source.dtype:
        ctypes.memmove(out.data_ptr(), source.data_ptr(), source.nbytes)
        return
    for to, one in zip(*(torch.split(one, _block()) for one in (out, source)), strict=True):
        to.copy_(one)


def _block() -> int:
    """Elements: the most for which PyTorch takes no further thread; more is faster."""
    return 1 << 17 if torch.get_num_threads() == 1 else 1 << 15
