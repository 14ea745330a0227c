"""What one rank writes of a state. Pure; ``planner`` makes it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from hydroslurm.checkpoint.tensor_file import Laid, Piece, is_frozen_part, lay_out
from hydroslurm.checkpoint.tree import JsonValue
from hydroslurm.core.decoding import Count

TALLY_MODULUS = 2**61 - 1
"""A prime, so that a number of values times its weight is never nothing."""


@dataclass(frozen=True)
class State:
    """What is saved, by name: what all ranks share, and this rank's own.

    Attributes:
        frozen: where in memory the shared tensors are (``data_ptr()``) that no optimizer changes.
            One that has changed after all is saved as any other.
    """

    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    frozen: Collection[int] = field(default=(), kw_only=True)


class SharedTensor(NamedTuple):
    """A tensor that all ranks share.

    Attributes:
        dtype: its name without ``torch.``.
        writer: the rank that writes it; None for one that the ranks write in pieces. One that is
            frozen has the number of that rank's file of those (``tensor_file.frozen_part``).
    """

    shape: tuple[Count, ...]
    dtype: str
    writer: int | None


@dataclass(frozen=True)
class WritePlan:
    """What one rank has to write of a state.

    Attributes:
        pieces: the tensors, or parts of them, that this rank writes: of what is shared, then own.
        tensors: one for each piece; the caller's own memory, not a copy.
        frozen_pieces, frozen: the same of what is frozen; ``frozen`` is None where it is stored,
            and this is a copy of the rest.
        shared: the state that all ranks share, without tensors; only rank 0 writes it.
        own: this rank's own state, without tensors.
        shared_tensors: every tensor that the ranks share, by key.
        whole_bytes: of the state of all ranks, assuming that each has as much of its own.
        frozen_bytes: of it, what is frozen.
        fingerprint: of ``frozen`` (``frozen.fingerprint``); empty as long as nobody has asked.
        is_stored: this rank need not write what is frozen: it has none, or there are files of it.
    """

    rank: int
    pieces: tuple[Piece, ...]
    tensors: tuple[torch.Tensor, ...]
    frozen_pieces: tuple[Piece, ...]
    frozen: tuple[torch.Tensor, ...] | None
    shared: dict[str, JsonValue]
    own: dict[str, JsonValue]
    shared_tensors: dict[str, SharedTensor]
    whole_bytes: int
    frozen_bytes: int
    fingerprint: str = ""
    is_stored: bool = False

    @property
    def state_bytes(self) -> int:
        """Of the state of all ranks, without what is stored already."""
        return self.whole_bytes - (self.frozen_bytes if self.is_stored else 0)

    @cached_property
    def laid(self) -> Laid:
        """How the pieces lie in this rank's file."""
        return lay_out(self.pieces, rank=self.rank)

    @cached_property
    def laid_frozen(self) -> Laid:
        """How those of what is frozen lie in theirs."""
        return lay_out(self.frozen_pieces, rank=self.rank)

    @property
    def digest(self) -> str:
        """Equal on all ranks if they have the same tensors."""
        lines = sorted(
            f"{key} {one.shape} {one.dtype} {_kind_of(one.writer)}"
            for key, one in self.shared_tensors.items()
        )
        return f"{len(lines)} tensors, {zlib.crc32(chr(10).join(lines).encode()):08x}"

    @property
    def tally(self) -> int:
        """Of the values of shared tensors that this rank writes. Those of all ranks together are
        :attr:`whole_tally` if they write every value once."""
        pieces = (*self.pieces, *self.frozen_pieces)
        return tally_of(
            (one.key, math.prod(one.sizes)) for one in pieces if one.key in self.shared_tensors
        )

    @property
    def whole_tally(self) -> int:
        """Of all values of the shared tensors."""
        return tally_of((key, math.prod(one.shape)) for key, one in self.shared_tensors.items())


def tally_of(values: Iterable[tuple[str, int]]) -> int:
    """A sum over keys and the numbers of values that there are of each. Every key has its own
    weight: what one has too many does not make up for what another one lacks."""
    return sum((zlib.crc32(key.encode()) | 1) * number for key, number in values) % TALLY_MODULUS


def _kind_of(writer: int | None) -> str:
    """For :attr:`WritePlan.digest`: how a tensor is written, whoever does it."""
    if writer is None:
        return "in pieces"
    return "frozen" if is_frozen_part(writer) else "whole"
