"""Boxes inside tensors: which part of a piece that was saved belongs into which part of another."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

Numbers = tuple[int, ...]


class Box(NamedTuple):
    """A part of a tensor: where it begins, and its sizes."""

    offsets: Numbers
    sizes: Numbers

    @property
    def volume(self) -> int:
        """Of its values."""
        return math.prod(self.sizes)

    def common(self, other: Box) -> Box | None:
        """What is in both; None if nothing is."""
        if self == other:
            return None if 0 in self.sizes else self
        begins = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + n, b + m) - begin
            for a, n, b, m, begin in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, begins, strict=True
            )
        )
        return Box(begins, sizes) if all(size > 0 for size in sizes) else None

    def span(self, inner: Box) -> tuple[int, int]:
        """Of a box inside of this one, in C order: its first value, and how many from there on to
        its last one. It is contiguous if these are as many as it has."""
        first, last = 0, 0
        for at, size, offset, count in zip(
            self.offsets, self.sizes, inner.offsets, inner.sizes, strict=True
        ):
            first = first * size + offset - at
            last = last * size + offset - at + count - 1
        return first, last - first + 1

    def strides(self) -> Numbers:
        """Of its values in C order."""
        found = [1]
        for size in reversed(self.sizes[1:]):
            found.append(found[-1] * size)
        return tuple(reversed(found)) if self.sizes else ()

    def view(self, flat: torch.Tensor, inner: Box, *, begin: int = 0) -> torch.Tensor:
        """The values of a box inside of this one.

        Args:
            flat: the values of this box in C order, from number ``begin`` on.
        """
        first, _ = self.span(inner)
        return flat.as_strided(inner.sizes, self.strides(), flat.storage_offset() + first - begin)
