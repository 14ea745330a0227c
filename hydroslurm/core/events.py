"""The typed events of a run, and their append-only JSONL log: one file per rank.

One event is one line of JSON. Every line carries both clocks: ``mono_ns`` (CLOCK_MONOTONIC, for
durations within one boot of one machine) and ``epoch_ns`` (CLOCK_REALTIME, for moments and for
lining ranks up). A line is written with one ``write`` to a file opened with O_APPEND, so that a
crash tears the last line at the most; :func:`read_events` passes over a torn one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import msgspec

from hydroslurm.core.decoding import (
    MOST_RANK,
    Count,
    Duration,
    Integer,
    Rank,
    Small,
    decode,
    encode,
)
from hydroslurm.core.files import open_journal, open_regular, write_all

SCHEMA: Literal[1] = 1


def clocks() -> tuple[int, int]:
    """Now, as (CLOCK_MONOTONIC ns, CLOCK_REALTIME ns)."""
    return time.monotonic_ns(), time.time_ns()


MOST_LINE_BYTES = 64 << 10
"""Upper bound on a line that we write."""

MOST_READ_BYTES = 256 << 20
"""Read at most the end of a log: about a million events."""

if TYPE_CHECKING:
    Value = Any
else:
    Scalar = None | bool | Integer | float | str
    Value = (
        Scalar | list[Scalar | list[Scalar] | dict[str, Scalar]] | dict[str, Scalar | list[Scalar]]
    )
"""JSON of bounded depth, because printing recurses."""


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
    # of a node's agent, in its own file, where rank is the node's number
    WORKERS_STARTED = "workers_started"
    SIGNAL_PASSED_ON = "signal_passed_on"
    AGENT_LEFT = "agent_left"


@dataclass(frozen=True)
class Event:
    """One thing that happened to one rank.

    Attributes:
        v: version of the line.
        kind: what happened.
        mono_ns: when, CLOCK_MONOTONIC, nanoseconds.
        epoch_ns: when, CLOCK_REALTIME, nanoseconds.
        rank: global rank; 0 outside of a job.
        job_id: Slurm's, None outside of a job.
        restart_count: how often the job had been requeued.
        pid: of the rank.
        host: of the rank.
        step: training step; None if it was never set (``controller.step = n``).
        data: what only this kind has; units are in the names.
    """

    v: Literal[1] = field(default=SCHEMA, kw_only=True, repr=False)
    kind: EventKind
    mono_ns: Count
    epoch_ns: Count
    rank: Rank = 0
    job_id: Integer | None = None
    restart_count: Small = 0
    pid: Small = 0
    host: str = ""
    step: Integer | None = None
    data: Mapping[str, Value] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line, without the newline."""
        return encode(self).decode()

    @classmethod
    def from_json(cls, line: str | bytes) -> Event:
        """Read one line, which anybody may have written. Everything behind may trust the types of
        what it returns, including the fields of ``data`` that :class:`_Known` names.

        Raises:
            ValueError: not JSON, not an event, of another schema or of an unknown kind.
        """
        event = decode(cls, line)
        msgspec.convert(event.data, _Known)
        return event


Counts = dict[str, Count]


class _Known(TypedDict, total=False):
    """Types of the fields that readers calculate with, the same in every kind of event. All are
    optional."""

    asked_by: Counts
    causes: list[str]
    checkpoint_step: Count | None
    children: Count
    deaf: list[str]
    in_flight: Count | None
    meaning: str
    lost: bool
    message: str | None
    moved_bytes: Count
    moved_s: Duration
    node_name: str | None
    park_us: Duration
    pause: Count
    reason: str | None
    requested_mono_ns: Count | None
    restore_s: Duration
    resume_us: Duration
    seconds: Duration | None
    state: str
    status: int | None
    step_id: Count | None
    step_tasks: Count
    task: Count
    vacate_s: Duration
    what: str
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANK)]


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
        message = ""
        with self._lock:
            try:
                if self._fd is None:
                    self._fd = self._open(self.path)
                write_all(self._fd, self._dropped_line(event) + _line(event))
            except OSError as error:
                self._close()  # the next try looks whether a line was torn
                self._dropped += 1
                if self._dropped == 1:
                    message = (
                        f"events cannot be written to {self.path} ({error}); training goes on and "
                        "pausing still works. Until there is room again they are lost"
                    )
            else:
                if self._dropped:
                    self._dropped = 0
                    message = f"events are written to {self.path} again"
        if message:  # without the lock: what shows it may run operators, and be held at one
            with contextlib.suppress(RuntimeWarning):  # an error by -W would end a thread of ours
                warnings.warn(f"hydroslurm: {message}", RuntimeWarning, stacklevel=3)

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


def _line(event: Event) -> bytes:
    """Encode an event. Where the line would be too long for readers, cut its texts and leave its
    lists out."""
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
"""Characters, of up to 12 bytes each, to which the texts of a long event are cut."""


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
    for line in event_lines(path, most_bytes=most_bytes):
        if wanted is None or any(name in line for name in wanted):
            with contextlib.suppress(ValueError):
                event = Event.from_json(line)
                if kinds is None or event.kind in kinds:
                    yield event


def event_lines(path: Path, *, most_bytes: int = MOST_READ_BYTES) -> Iterator[bytes]:
    """The lines in the last ``most_bytes`` of a file; a longer one than any of ours in parts.

    Raises:
        OSError: as for :func:`read_events`.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        # no further than the size now: a writer may be faster than we are
        left = min(most_bytes, os.fstat(file.fileno()).st_size)
        file.seek(-left, os.SEEK_END)
        while left > 0 and (line := file.readline(min(left, MOST_LINE_BYTES))):
            left -= len(line)
            yield line
