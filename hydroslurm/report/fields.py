"""The fields of lines that may be torn, damaged or of another program: typed, or None. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hydroslurm.report.lines import Line


def data_of(line: Line | None) -> Mapping[str, Any]:
    """The fields of a line; none when there is no line or it carries something else."""
    return line.data if line is not None and isinstance(line.data, dict) else {}


def stamp_of(line: Line | None) -> int | None:
    return None if line is None else line.mono_ns


def step_of(line: Line | None) -> int | None:
    step = None if line is None else line.step
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def integer(data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def first_integer(lines: Iterable[Line | None], key: str) -> int | None:
    found = (integer(data_of(line), key) for line in lines)
    return next((value for value in found if value is not None), None)


def text(data: Mapping[str, Any], key: str) -> str | None:
    value = data.get(key)
    return value if isinstance(value, str) else None


def number(data: Mapping[str, Any], key: str) -> float | None:
    """A finite number that is not negative, as every duration is."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value < float("inf") else None
