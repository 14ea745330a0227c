"""What one rank writes of a state. Pure; ``planner`` makes it."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from hydroslurm.checkpoint.tensor_file import Laid, Piece, dtype_name, is_frozen_part, lay_out
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


Whole: TypeAlias = tuple[str, tuple[int, ...], torch.dtype, "int | None"]


@dataclass(frozen=True)
class Layout:
    """What one rank writes of every state that looks alike, without the values.

    Attributes:
        pieces: the tensors, or parts of them, that this rank writes: of what is shared, then own.
        frozen: the same of what is frozen.
        wholes: of every tensor that the ranks share: key, shape, dtype, and its writer (see
            :class:`SharedTensor`). What is made of it is not made while the training waits.
        state_bytes: of the state of all ranks, assuming that each has as much of its own.
        frozen_bytes: of it, what is frozen.
    """

    rank: int
    world_size: int
    pieces: tuple[Piece, ...]
    frozen: tuple[Piece, ...]
    wholes: tuple[Whole, ...]
    state_bytes: int
    frozen_bytes: int

    @cached_property
    def laid(self) -> Laid:
        """How the pieces lie in this rank's file."""
        return lay_out(self.pieces, rank=self.rank)

    @cached_property
    def laid_frozen(self) -> Laid:
        """How those of what is frozen lie in theirs."""
        return lay_out(self.frozen, rank=self.rank)

    @cached_property
    def shared_tensors(self) -> bytes:
        """Of the tensors that the ranks share: key -> shape, dtype, writer, as JSON."""
        found = {
            key: SharedTensor(shape, dtype_name(dtype), writer)
            for key, shape, dtype, writer in self.wholes
        }
        return json.dumps(found, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """Equal on all ranks if they have the same tensors."""
        lines = sorted(
            f"{key} {shape} {dtype} {_kind_of(writer)}" for key, shape, dtype, writer in self.wholes
        )
        return f"{len(lines)} tensors, {zlib.crc32(chr(10).join(lines).encode()):08x}"

    @cached_property
    def tally(self) -> int:
        """Of the values of shared tensors that this rank writes. Those of all ranks together are
        :attr:`whole_tally` if they write every value once."""
        shared = {key for key, _, _, _ in self.wholes}
        pieces = (*self.pieces, *self.frozen)
        return tally_of((one.key, math.prod(one.sizes)) for one in pieces if one.key in shared)

    @cached_property
    def whole_tally(self) -> int:
        """Of all values of the shared tensors."""
        return tally_of((key, math.prod(shape)) for key, shape, _, _ in self.wholes)


@dataclass(frozen=True)
class WritePlan:
    """What one rank has to write of a state.

    Attributes:
        shared: the state that all ranks share, without tensors; only rank 0 writes it.
        own: this rank's own state, without tensors.
        tensors: one for each piece of the layout; the caller's own memory, not a copy.
        frozen: the same of what is frozen; None: it is stored, and this is a copy of the rest.
        fingerprint: of ``frozen`` (``frozen.fingerprint``); empty as long as nobody has asked.
        is_stored: this rank need not write what is frozen: it has none, or there are files of it.
    """

    layout: Layout
    shared: dict[str, JsonValue]
    own: dict[str, JsonValue]
    tensors: tuple[torch.Tensor, ...]
    frozen: tuple[torch.Tensor, ...] | None
    fingerprint: str = ""
    is_stored: bool = False

    @property
    def state_bytes(self) -> int:
        """Of the state of all ranks, without what is stored already."""
        stored_bytes = self.layout.frozen_bytes if self.is_stored else 0
        return self.layout.state_bytes - stored_bytes


def tally_of(values: Iterable[tuple[str, int]]) -> int:
    """A sum over keys and the numbers of values that there are of each. Every key has its own
    weight: what one has too many does not make up for what another one lacks."""
    return sum((zlib.crc32(key.encode()) | 1) * number for key, number in values) % TALLY_MODULUS


def _kind_of(writer: int | None) -> str:
    """For :attr:`Layout.digest`: how a tensor is written, whoever does it."""
    if writer is None:
        return "in pieces"
    return "frozen" if is_frozen_part(writer) else "whole"
