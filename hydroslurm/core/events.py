"""The typed events of a run, and their append-only JSONL log: one file per rank.

One event is one line of JSON. Every line carries both clocks: ``mono_ns`` (CLOCK_MONOTONIC, for
durations within one boot of one machine) and ``epoch_ns`` (CLOCK_REALTIME, for moments and for
lining ranks up). A line is written with one ``write`` to a file opened with O_APPEND, so that a
crash tears the last line at the most; :func:`read_events` passes over a torn one.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from hydroslurm.core.files import open_regular, parse_json
from hydroslurm.core.journal import open_journal, write_all

SCHEMA = 1

MOST_LINE_BYTES = 64 << 10
"""No line of ours is longer."""

MOST_READ_BYTES = 256 << 20
"""Of one file, from its end: a million events."""

MOST_RANK = 10**6
"""A number beyond is damage."""


class EventKind(str, Enum):
    """What can happen to a rank. The value is the word in the file."""

    # that of the word, which it is equal to; Enum's own is a Python call at each look into a dict
    __hash__ = str.__hash__

    INSTALLED = "installed"
    UNINSTALLED = "uninstalled"
    SIGNAL_RECEIVED = "signal_received"
    GATE_CLOSED = "gate_closed"
    FIRST_OPERATOR_HELD = "first_operator_held"
    PARKED = "parked"
    DRAINED = "drained"
    NOT_DRAINED = "not_drained"
    VACATED = "vacated"
    NOT_VACATED = "not_vacated"
    RESTORED = "restored"
    RESTORE_WAITS = "restore_waits"
    RESTORE_FAILED = "restore_failed"
    RESUMED = "resumed"
    FIRST_OPERATOR_RELEASED = "first_operator_released"
    LATE_OPERATOR_HELD = "late_operator_held"
    CAUSES_CHANGED = "causes_changed"
    STOP_REQUESTED = "stop_requested"
    TERMINAL_STOP = "terminal_stop"
    TERMINAL_STOP_IGNORED = "terminal_stop_ignored"
    CALLBACK_LOST = "callback_lost"
    HANDLER_REPLACED = "handler_replaced"
    EVENTS_DROPPED = "events_dropped"
    OUTPUT_LOST = "output_lost"
    NUMA_BOUND = "numa_bound"
    # of several ranks: how they came together, and what they agreed on
    RANKS_JOINED = "ranks_joined"
    GENERATION = "generation"
    LET_THROUGH = "let_through"
    ALL_PARKED = "all_parked"
    RANK_GONE = "rank_gone"
    COORDINATOR_LOST = "coordinator_lost"
    STOP_AGREED = "stop_agreed"
    AGREEMENT_FAILED = "agreement_failed"
    # of the two calls: this rank saves in its own way, and leaves
    STOPS_TAKEN = "stops_taken"
    # of a Run: what was trained, saved, and why it left
    ATTEMPT_BEGAN = "attempt_began"
    FIRST_STEP = "first_step"
    SAFE_POINT = "safe_point"
    STOP_REASON = "stop_reason"
    SAVE_STARTED = "save_started"
    SAVE_STAGED = "save_staged"
    SAVE_NOT_COPIED = "save_not_copied"
    SAVE_WRITTEN = "save_written"
    SAVE_COMMITTED = "save_committed"
    SAVE_FAILED = "save_failed"
    SAVE_SKIPPED = "save_skipped"
    SAVE_ABANDONED = "save_abandoned"
    REQUEUE_ASKED = "requeue_asked"
    REQUEUED = "requeued"
    REQUEUE_FAILED = "requeue_failed"
    RUN_FINISHED = "run_finished"
    ATTEMPT_ENDED = "attempt_ended"
    # of a node's agent, in a file of its own: rank is the node's number there
    WORKERS_STARTED = "workers_started"
    SIGNAL_PASSED_ON = "signal_passed_on"
    NODE_STATE = "node_state"
    AGENT_LEFT = "agent_left"


@dataclass(frozen=True)
class Event:
    """One thing that happened to one rank.

    Attributes:
        kind: what happened.
        mono_ns: when, CLOCK_MONOTONIC, nanoseconds.
        epoch_ns: when, CLOCK_REALTIME, nanoseconds.
        rank: global rank; 0 outside of a job.
        job_id: Slurm's, None outside of a job.
        restart_count: how often the job had been requeued.
        pid: of the rank.
        host: of the rank.
        step: training step, None when nobody told us (``controller.step = n``).
        data: what only this kind has; units are in the names.
    """

    kind: EventKind
    mono_ns: int
    epoch_ns: int
    rank: int = 0
    job_id: int | None = None
    restart_count: int = 0
    pid: int = 0
    host: str = ""
    step: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line, without the newline."""
        row = {
            "v": SCHEMA,
            "kind": self.kind.value,
            "mono_ns": self.mono_ns,
            "epoch_ns": self.epoch_ns,
            "rank": self.rank,
            "job_id": self.job_id,
            "restart_count": self.restart_count,
            "pid": self.pid,
            "host": self.host,
            "step": self.step,
            "data": dict(self.data),
        }
        return json.dumps(row, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | bytes) -> Event:
        """Read one line, which anybody may have written. Everything behind may trust the types of
        what it returns, and the fields of ``data`` that :data:`_FIELDS` names where they are there.
        Texts are what they are, lone surrogates included, which an error of our own may hold:
        :func:`~hydroslurm.core.files.clean` them where they are shown.

        Raises:
            ValueError: not JSON, not an event, of a newer schema or of an unknown kind.
        """
        row = parse_json(line, printable=False)
        if not isinstance(row, dict) or row.get("v") != SCHEMA:
            raise ValueError(f"not an event of schema {SCHEMA}: {line[:80]!r}")
        data = row.get("data")
        if not isinstance(data, dict):
            raise ValueError(f"an event without data: {line[:80]!r}")
        for name in _FIELDS.keys() & data.keys():
            if not _FIELDS[name](data[name]):
                raise ValueError(f"{name} of an event is {str(data[name])[:80]!r}")
        job_id, step, host = row.get("job_id"), row.get("step"), row.get("host")
        return cls(
            kind=EventKind(row.get("kind")),
            mono_ns=_integer(row, "mono_ns", MOST_NS),
            epoch_ns=_integer(row, "epoch_ns", MOST_NS),
            rank=_integer(row, "rank", MOST_RANK),
            job_id=job_id if type(job_id) is int else None,
            restart_count=_integer(row, "restart_count", 1 << 31),
            pid=_integer(row, "pid", 1 << 31),
            host=host if isinstance(host, str) else "",
            step=step if type(step) is int else None,
            data=data,
        )


MOST_NS = (1 << 63) - 1


def _integer(row: Mapping[str, Any], name: str, most: int) -> int:
    value = row.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} of an event is {str(value)[:80]!r}; wanted 0 to {most}")
    return value


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_count_or_none(value: object) -> bool:
    return value is None or _is_count(value)


def _is_duration(value: object) -> bool:
    """One that can be calculated with: a million years are 3e19 us."""
    return type(value) in (int, float) and -1e20 < value < 1e20  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _are_counts(value: object) -> bool:
    return isinstance(value, dict) and all(_is_count(one) for one in value.values())


_FIELDS: Mapping[str, Callable[[object], bool]] = {
    "asked_by": _are_counts,
    "answered": lambda value: value is None or isinstance(value, bool),
    "causes": _are_texts,
    "checkpoint_step": _is_count_or_none,
    "children": _is_count,
    "counts": _are_counts,
    "deaf": _are_texts,
    "held_for": _are_texts,
    "in_flight": _is_count_or_none,
    "meaning": _is_text,
    "lost": lambda value: isinstance(value, bool),
    "moved_bytes": _is_count,
    "moved_s": _is_duration,
    "node_name": _is_text_or_none,
    "park_us": _is_duration,
    "pause": _is_count,
    "pids": _are_counts,
    "reason": _is_text_or_none,
    "requested_mono_ns": _is_count_or_none,
    "restore_s": _is_duration,
    "resume_us": _is_duration,
    "seconds": lambda value: value is None or _is_duration(value),
    "state": _is_text,
    "step_id": _is_count_or_none,
    "step_tasks": _is_count,
    "task": _is_count,
    "status": lambda value: value is None or type(value) is int,
    "vacate_s": _is_duration,
    "what": _is_text,
    "message": _is_text_or_none,
    "world_size": lambda value: type(value) is int and 1 <= value <= MOST_RANK,
}
"""What those fields are that a reader calculates with. They mean the same in every kind of event;
one that is absent was not told."""


class EventLog:
    """Appends events to one file; a disk that is full costs one warning and never the training.

    Opened at the first event. Events that cannot be appended are lost; an ``events_dropped`` counts
    them once there is room again. May be used from any thread: the lock is held for one write,
    never across an operator of torch's, so that no thread is parked with it.
    """

    def __init__(self, path: Path | None) -> None:
        """``path=None`` makes a log that keeps nothing."""
        self.path = path
        self._fd: int | None = None
        self._dropped = 0
        self._lock = threading.Lock()

    def append(self, event: Event) -> None:
        """Write one line."""
        if self.path is None:
            return
        with self._lock:
            try:
                if self._fd is None:
                    self._fd = self._open(self.path)
                write_all(self._fd, self._dropped_line(event) + _line(event))
            except OSError as error:
                self._close()  # the next try looks whether a line was torn
                self._dropped += 1
                if self._dropped == 1:
                    self._say(
                        f"hydroslurm: events cannot be written to {self.path} ({error}); training "
                        "goes on and pausing still works. Until there is room again they are lost"
                    )
                return
            if self._dropped:
                self._dropped = 0
                self._say(f"hydroslurm: events are written to {self.path} again")

    def close(self) -> None:
        with self._lock:
            self._close()

    @staticmethod
    def _open(path: Path) -> int:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open_journal(path)

    def _dropped_line(self, event: Event) -> bytes:
        if not self._dropped:
            return b""
        dropped = replace(
            event, kind=EventKind.EVENTS_DROPPED, step=None, data={"count": self._dropped}
        )
        return _line(dropped)

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _say(self, message: str) -> None:
        with contextlib.suppress(RuntimeWarning):  # an error by -W would end a thread of ours
            warnings.warn(message, RuntimeWarning, stacklevel=4)


def _line(event: Event) -> bytes:
    """As it is written. Of one that no reader would take, the texts are cut, and what is longer is
    left out."""
    line = event.to_json().encode() + b"\n"
    if len(line) > MOST_LINE_BYTES:
        data = {
            name: value[:_CUT] if isinstance(value, str) else value
            for name, value in event.data.items()
            if not isinstance(value, (Sequence, Mapping)) or isinstance(value, str)
        }
        line = replace(event, data=data).to_json().encode() + b"\n"
    return line


_CUT = 1000
"""Characters of a text, each up to 12 bytes, in an event that is too long."""


def read_events(
    path: Path, *, kinds: Collection[EventKind] | None = None, most_bytes: int = MOST_READ_BYTES
) -> Iterator[Event]:
    """The events of one file in order, those in its last ``most_bytes``; lines that are torn or
    foreign are passed over.

    Args:
        kinds: only these, which is much quicker: other lines are not parsed.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    wanted = None if kinds is None else [f'"{kind.value}"'.encode() for kind in kinds]
    with os.fdopen(open_regular(path), "rb") as file:
        # no further than it is now: somebody may write faster than we read
        left = min(most_bytes, os.fstat(file.fileno()).st_size)
        file.seek(-left, os.SEEK_END)
        while left > 0 and (line := file.readline(min(left, MOST_LINE_BYTES))):
            left -= len(line)
            yield from _event_in(line, wanted)


def _event_in(line: bytes, wanted: Sequence[bytes] | None) -> Iterator[Event]:
    if wanted is not None and not any(name in line for name in wanted):
        return
    try:
        event = Event.from_json(line)
    except ValueError:
        return
    if wanted is None or f'"{event.kind.value}"'.encode() in wanted:
        yield event
