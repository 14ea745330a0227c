"""The fields of lines that may be torn, damaged or of another program: typed, or None. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hydroslurm.core.files import clean
from hydroslurm.report.lines import Line

_MOST_INTEGER = 1 << 63
_MOST_NUMBER = 1e18
"""Sums of such numbers are finite, and nothing that we measure is as large."""


# A report of a million lines asks for ten million fields: what is nearly always so comes first.


def data_of(line: Line | None) -> Mapping[str, Any]:
    """The fields of a line; none when there is no line."""
    return {} if line is None else line.data


def stamp_of(line: Line | None) -> int | None:
    return None if line is None else line.mono_ns


def step_of(line: Line | None) -> int | None:
    return line.step if line is not None and type(line.step) is int else None


def integer(data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    if type(value) is int and -_MOST_INTEGER <= value < _MOST_INTEGER:
        return value
    return None


def first_integer(lines: Iterable[Line | None], key: str) -> int | None:
    for line in lines:
        if line is not None and (value := integer(line.data, key)) is not None:
            return value
    return None


def text(data: Mapping[str, Any], key: str) -> str | None:
    """Such that it can be shown."""
    value = data.get(key)
    return clean(value) if isinstance(value, str) else None


def number(data: Mapping[str, Any], key: str) -> float | None:
    """A finite number that is not negative, as every duration is."""
    value = data.get(key)
    if type(value) is float or type(value) is int:
        return float(value) if 0 <= value < _MOST_NUMBER else None
    return None
