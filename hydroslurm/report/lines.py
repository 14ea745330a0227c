"""The events of a rank's file for a report, and their typed fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydroslurm.core.decoding import decode
from hydroslurm.core.events import SCHEMA, Event, EventKind, event_lines
from hydroslurm.core.files import clean

_MOST_BYTES = 1 << 30
"""Read at most this much from a file's end: three million events."""


_MOST_INTEGER = 1 << 63
_MOST_NUMBER = 1e18
"""Above any value we measure, and small enough that sums stay finite."""


@dataclass
class Unread:
    """Counts of unreadable lines.

    Attributes:
        torn: cut off, or not an event.
        unknown: from a later version: unknown schema or kind.
    """

    torn: int = 0
    unknown: int = 0

    def words(self) -> Iterator[str]:
        if self.torn:
            yield f"torn lines that were passed over: {self.torn}"
        if self.unknown:
            yield f"lines of a later version of hydroslurm, passed over: {self.unknown}"


def rank_events(path: Path, unread: Unread) -> Iterator[Event]:
    """Yield the events of one file in order; count skipped lines in ``unread``.

    Raises:
        OSError: the file cannot be read.
    """
    for line in event_lines(path, most_bytes=_MOST_BYTES):
        try:
            yield Event.from_json(line)
        except ValueError:
            if _is_of_later_version(line):
                unread.unknown += 1
            else:
                unread.torn += 1


@dataclass
class _Head:
    v: int
    kind: str


def _is_of_later_version(line: bytes) -> bool:
    try:
        head = decode(_Head, line)
    except ValueError:
        return False
    return head.v > SCHEMA or head.kind not in {kind.value for kind in EventKind}


# --- the fields of one event ------------------------------------------------------------------
#
# A line may be damaged or from another program: a field has the expected type or is None.
# A report of a million lines reads ten million fields, so the common case is tested first.


def data_of(event: Event | None) -> Mapping[str, Any]:
    """Return the fields of an event; none if there is no event."""
    return {} if event is None else event.data


def stamp_of(event: Event | None) -> int | None:
    return None if event is None else event.mono_ns


def step_of(event: Event | None) -> int | None:
    return None if event is None else event.step


def span(begin_ns: int | None, end_ns: int | None, unit_ns: float) -> float | None:
    """Return the time between two stamps in a unit. None if one is unknown or they run backwards:
    such stamps are damaged, and a negative latency is worse than none."""
    if begin_ns is None or end_ns is None or end_ns < begin_ns:
        return None
    return (end_ns - begin_ns) / unit_ns


def spelled(time_s: float) -> str:
    """Format a time with the unit that keeps it short."""
    for unit, size_s in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(time_s) >= size_s * 0.9995:
            return f"{time_s / size_s:.3g} {unit}" if abs(time_s) < 999.5 else f"{time_s:,.0f} s"
    return f"{time_s / 1e-9:.3g} ns"


def integer(data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    if type(value) is int and -_MOST_INTEGER <= value < _MOST_INTEGER:
        return value
    return None


def first_integer(events: Iterable[Event | None], key: str) -> int | None:
    for event in events:
        if event is not None and (value := integer(event.data, key)) is not None:
            return value
    return None


def text(data: Mapping[str, Any], key: str) -> str | None:
    """Return a printable text field."""
    value = data.get(key)
    return clean(value) if isinstance(value, str) else None


def number(data: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number >= 0, as every duration is."""
    value = data.get(key)
    if type(value) is float or type(value) is int:
        return float(value) if 0 <= value < _MOST_NUMBER else None
    return None
