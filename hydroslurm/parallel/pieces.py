"""What is reduced: buckets, in pieces, in chosen types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hydroslurm.errors import ReductionFailed
from hydroslurm.parallel.copies import CudaCopies, HostCopies


@dataclass(frozen=True)
class Arithmetic:
    """In what types gradients are added and sent.

    Attributes:
        accumulate: the type of the sums; None: float32, and float64 for gradients of float64.
        wire: what travels between nodes; None: the gradients' own type.
        piece_elements: how many elements a piece has.
    """

    accumulate: torch.dtype | None
    wire: torch.dtype | None
    piece_elements: int

    def sums(self, kind: torch.dtype) -> torch.dtype:
        wide = torch.float64 if kind is torch.float64 else torch.float32
        return self.accumulate or wide

    def sent(self, kind: torch.dtype) -> torch.dtype:
        return self.wire or kind


@dataclass(eq=False)
class Job:
    """One bucket under way. ``finish`` is called once, with the reason of a failure or None."""

    bucket: torch.Tensor
    begun: Any
    copies: HostCopies | CudaCopies
    finish: Callable[[ReductionFailed | None], None]


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of a job's bucket; pieces are numbered from 0."""

    job: Job
    start: int
    stop: int
    number: int
    is_last: bool

    @property
    def count(self) -> int:
        return self.stop - self.start
