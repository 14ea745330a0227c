"""Decode untrusted JSON by msgspec: every field of a dataclass has its declared type and bounds, or
a ValueError names the field."""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

MOST_NS = (1 << 63) - 1
MOST_RANK = 10**6
"""A number beyond is damage."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_NS)]
Integer = Annotated[int, msgspec.Meta(ge=-MOST_NS, le=MOST_NS)]
Small = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=MOST_RANK)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e30)]
Duration = Annotated[float, msgspec.Meta(gt=-1e20, lt=1e20)]
"""One that can be calculated with: a million years are 3e19 us."""
Text = Annotated[str, msgspec.Meta(max_length=2000)]


def encode(value: Any) -> bytes:
    """One JSON text, without spaces; half a character, as in some names of files, becomes ``?``."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value)
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def decode(kind: type[T], text: str | bytes) -> T:
    """A JSON text as a ``kind``: a dataclass of numbers, texts, enumerations, literals, tuples,
    dataclasses, and unions of them. Fields that it does not have are left out.

    Raises:
        ValueError: no JSON, or a field is missing, of another type or out of bounds.
    """
    try:
        decoded: T = _decoder(kind).decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return decoded


_decoder: Any = functools.cache(msgspec.json.Decoder)
