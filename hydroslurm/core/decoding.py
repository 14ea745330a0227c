"""Dataclasses from JSON that somebody else may have written: each field has its declared type."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_hints_of = functools.cache(get_type_hints)


def decode(kind: type[T], value: Any, *, ignore_unknown: bool = False) -> T:
    """``value``, of :func:`~hydroslurm.core.files.parse_json`, as a ``kind``: a dataclass of
    numbers, texts, enumerations, literals, tuples, dataclasses, and unions of them.

    Args:
        ignore_unknown: whether fields that the dataclass does not have are left out, instead of
            refused.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    decoded: T = _decode(kind, value, ignore_unknown)
    return decoded


def _decode(kind: Any, value: Any, ignore_unknown: bool = False) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for one in arguments:
            with contextlib.suppress(ValueError):
                return _decode(one, value)
    elif origin is Literal:
        if type(value) is str and value in arguments:
            return value
    elif origin is tuple:
        kinds = arguments
        if isinstance(value, list) and arguments[1:] == (...,):
            kinds = arguments[:1] * len(value)
        if isinstance(value, list) and len(kinds) == len(value):
            return tuple(map(_decode, kinds, value))
    elif isinstance(kind, type) and is_dataclass(kind):
        hints = _hints_of(kind)
        if isinstance(value, dict) and (ignore_unknown or value.keys() <= hints.keys()):
            given = {name: _decode(hints[name], value[name]) for name in hints if name in value}
            with contextlib.suppress(TypeError):  # one without a default is missing
                return kind(**given)
    elif issubclass(kind, Enum) or (kind is float and type(value) is int):
        return kind(value)
    elif type(value) is kind:
        return value
    name = getattr(kind, "__name__", str(kind))
    raise ValueError(f"{str(value)[:80]!r} is no {name}")
