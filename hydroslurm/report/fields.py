"""The fields of events that may be torn, damaged or of another program: typed, or None. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hydroslurm.events import Event


def data_of(event: Event | None) -> Mapping[str, Any]:
    """The fields of an event; none when there is no event or it carries something else."""
    return event.data if event is not None and isinstance(event.data, Mapping) else {}


def stamp_of(event: Event | None) -> int | None:
    return None if event is None else event.mono_ns


def step_of(event: Event | None) -> int | None:
    step = None if event is None else event.step
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def integer(data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def first_integer(events: Iterable[Event | None], key: str) -> int | None:
    found = (integer(data_of(event), key) for event in events)
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
