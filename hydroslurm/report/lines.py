"""Read a rank's event file line by line, fast enough for millions of lines, with typed fields.

The result is what :func:`hydroslurm.core.events.read_events` returns, in a third of the time: a
regular expression splits a line written by :meth:`hydroslurm.core.events.Event.to_json`, and only
its ``data`` is parsed as JSON. Any other line is parsed as a whole. Files are streamed: a report of
a million events must not hold them in memory, and a ``Tail`` that follows a growing file would
copy every line once more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from json.scanner import make_scanner
from pathlib import Path
from typing import Any, NamedTuple

from hydroslurm.core.events import MOST_LINE_BYTES, MOST_RANK, SCHEMA, Event, EventKind
from hydroslurm.core.files import DECODER, check_depth, clean, open_regular, parse_json

_MOST_CHARACTERS = 1 << 30
"""Of one file: three million events."""


_MOST_INTEGER = 1 << 63
_MOST_NUMBER = 1e18
"""Sums of such numbers are finite, and nothing that we measure is as large."""


class Who(NamedTuple):
    """The process that wrote a line."""

    rank: int
    restart_count: int
    host: str
    pid: int
    job_id: int | None


class Line(NamedTuple):
    """One event; ``data`` is empty where the line holds something else than fields there."""

    kind: EventKind
    mono_ns: int
    epoch_ns: int
    who: Who
    step: Any
    data: dict[str, Any]


@dataclass
class Unread:
    """Lines that nothing could be made of.

    Attributes:
        torn: cut off, or not of an event.
        unknown: of a later version: its schema, or a kind that is not known here.
    """

    torn: int = 0
    unknown: int = 0


def lines_of(events: Iterable[Event]) -> Iterator[Line]:
    """The same of events that are there already."""
    for event in events:
        who = Who(event.rank, event.restart_count, event.host, event.pid, event.job_id)
        data = event.data if isinstance(event.data, dict) else {}
        yield Line(event.kind, event.mono_ns, event.epoch_ns, who, event.step, data)


def read_lines(path: Path, unread: Unread) -> Iterator[Line]:
    """The events of one file in order; the lines that are passed over are counted in ``unread``.

    Raises:
        OSError: the file cannot be read.
    """
    known: dict[str, Who] = {}
    kinds = {kind.value: kind for kind in EventKind}
    taken, decode = _HEAD.match, make_scanner(DECODER)  # type: ignore[arg-type]
    with os.fdopen(open_regular(path), encoding="utf-8", errors="replace", newline="\n") as file:
        left = _MOST_CHARACTERS
        lines: Iterator[str] = iter(partial(file.readline, MOST_LINE_BYTES), "")
        for text in lines:
            left -= len(text)
            if left < 0:
                unread.torn += 1
                return
            if len(text) == MOST_LINE_BYTES:
                continue  # a part of a line that is longer than any of ours
            match = taken(text)
            if match is not None and text.endswith("}}\n"):
                kind, mono, epoch, process, step = match.groups()
                who = known.get(process)
                try:
                    if who is None:
                        who = known[process] = _who(parse_json(f"{{{process}}}", printable=False))
                    check_depth(text)
                    data, end = decode(text, match.end())
                    if end != len(text) - 2:
                        raise ValueError("something follows the fields")
                    at_step = None if step == "null" else int(step)
                    yield Line(kinds[kind], int(mono), int(epoch), who, at_step, data)
                    continue
                except (KeyError, ValueError, TypeError, RecursionError, StopIteration):
                    pass  # a kind of a later version, or damaged: asked once more below
            line = _any_line(text, unread)
            if line is not None:
                yield line


_HEAD = re.compile(
    rf'\{{"v":{SCHEMA},"kind":"(\w+)","mono_ns":([0-9]{{1,19}}),"epoch_ns":([0-9]{{1,19}}),'
    r'("rank":[0-9]{1,9},"job_id":(?:[0-9]{1,19}|null),"restart_count":[0-9]{1,9},'
    r'"pid":[0-9]{1,9},"host":"[^"\\]*"),"step":([0-9]{1,19}|null),"data":(?={)'
)


def _any_line(text: str, unread: Unread) -> Line | None:
    try:
        row = parse_json(text, printable=False)
        version = row["v"]
    except (ValueError, KeyError, TypeError):
        unread.torn += 1
        return None
    try:
        if not isinstance(version, int) or version > SCHEMA:
            raise ValueError(version)
        kind = EventKind(row["kind"])
    except (ValueError, KeyError, TypeError):
        unread.unknown += 1
        return None
    try:
        mono_ns, epoch_ns, data = _whole(row["mono_ns"]), _whole(row["epoch_ns"]), row.get("data")
        fields = data if isinstance(data, dict) else {}
        return Line(kind, mono_ns, epoch_ns, _who(row), row.get("step"), fields)
    except (KeyError, ValueError):
        unread.torn += 1
        return None


def _who(row: dict[str, Any]) -> Who:
    """Of the fields that a line has; one without a rank is of the only one."""
    job_id = row.get("job_id")
    return Who(
        _whole(row.get("rank", 0), most=MOST_RANK),
        _whole(row.get("restart_count", 0)),
        clean(str(row.get("host", ""))),
        _whole(row.get("pid", 0)),
        job_id if type(job_id) is int else None,
    )


def _whole(value: object, *, most: int = 1 << 63) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:80]!r} is no number from 0 to {most}")
    return value


# --- the fields of one line -------------------------------------------------------------------
#
# Lines may be torn, damaged or from another program: a field has the expected type or is None.
# A report of a million lines reads ten million fields, so the common case is tested first.


def data_of(line: Line | None) -> Mapping[str, Any]:
    """The fields of a line; none when there is no line."""
    return {} if line is None else line.data


def stamp_of(line: Line | None) -> int | None:
    return None if line is None else line.mono_ns


def step_of(line: Line | None) -> int | None:
    return line.step if line is not None and type(line.step) is int else None


def span(begin_ns: int | None, end_ns: int | None, unit_ns: float) -> float | None:
    """The time between two stamps, in a unit. None for what is unknown, and for stamps that run
    backwards: they are damaged, and a negative latency is worse than none."""
    if begin_ns is None or end_ns is None or end_ns < begin_ns:
        return None
    return (end_ns - begin_ns) / unit_ns


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
