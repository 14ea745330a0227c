"""The typed events of a run, and their append-only JSONL log: one file per rank.

One event is one line of JSON. Every line carries both clocks: ``mono_ns`` (CLOCK_MONOTONIC, for
durations within one boot of one machine) and ``epoch_ns`` (CLOCK_REALTIME, for moments and for
lining ranks up). A line is written with one ``write`` to a file opened with O_APPEND, so that a
crash tears the last line at the most; :func:`read_events` passes over a torn one.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hydroslurm.files import open_regular

SCHEMA = 1


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
    # of several ranks: how they came together, and what they agreed on
    RANKS_JOINED = "ranks_joined"
    LET_THROUGH = "let_through"
    ALL_PARKED = "all_parked"
    RANK_GONE = "rank_gone"
    HUB_LOST = "hub_lost"
    STOP_AGREED = "stop_agreed"
    AGREEMENT_FAILED = "agreement_failed"
    # of a Run: what was trained, saved, and why it left
    LIFE_BEGAN = "life_began"
    FIRST_STEP = "first_step"
    SAFE_POINT = "safe_point"
    STOP_REASON = "stop_reason"
    SAVE_STARTED = "save_started"
    SAVE_STAGED = "save_staged"
    SAVE_WRITTEN = "save_written"
    SAVE_COMMITTED = "save_committed"
    SAVE_FAILED = "save_failed"
    SAVE_SKIPPED = "save_skipped"
    SAVE_ABANDONED = "save_abandoned"
    REQUEUE_ASKED = "requeue_asked"
    REQUEUED = "requeued"
    REQUEUE_FAILED = "requeue_failed"
    RUN_FINISHED = "run_finished"
    LIFE_ENDED = "life_ended"
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
    def from_json(cls, line: str) -> Event:
        """Read one line.

        Raises:
            ValueError: not JSON, not an event, of a newer schema or of an unknown kind.
        """
        row = json.loads(line)
        if not isinstance(row, dict) or row.get("v") != SCHEMA:
            raise ValueError(f"not an event of schema {SCHEMA}: {line[:80]!r}")
        try:
            return cls(
                kind=EventKind(row["kind"]),
                mono_ns=int(row["mono_ns"]),
                epoch_ns=int(row["epoch_ns"]),
                rank=int(row["rank"]),
                job_id=row["job_id"],
                restart_count=int(row["restart_count"]),
                pid=int(row["pid"]),
                host=str(row["host"]),
                step=row["step"],
                data=row["data"],
            )
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not an event: {line[:80]!r} ({error})") from error


class EventLog:
    """Appends events to one file; a write that fails costs one warning and never the training.

    Opened at the first event. May be used from any thread: the lock is held for one write, never
    across an operator of torch's, so that no thread is parked with it.
    """

    def __init__(self, path: Path | None) -> None:
        """``path=None`` makes a log that keeps nothing."""
        self.path = path
        self._fd: int | None = None
        self._broken = path is None
        self._lock = threading.Lock()

    @property
    def working(self) -> bool:
        """False once a write has failed, or when there is no file."""
        return not self._broken

    def append(self, event: Event) -> None:
        """Write one line; after the first failure do nothing."""
        with self._lock:
            self._append(event)

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _append(self, event: Event) -> None:
        if self._broken or self.path is None:
            return
        try:
            if self._fd is None:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._fd = open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            line = event.to_json().encode() + b"\n"
            if os.write(self._fd, line) != len(line):
                raise OSError("short write, the disk is full")
        except OSError as error:
            self._broken = True
            warnings.warn(
                f"hydroslurm: events can no longer be written to {self.path} ({error}); "
                "training goes on and pausing still works, but this run's latencies will not be in "
                "its report",
                RuntimeWarning,
                stacklevel=3,
            )


def read_events(path: Path, *, offset: int = 0) -> Iterator[Event]:
    """The events of one file from a byte offset on, in order; lines that are torn or foreign are
    passed over."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            try:
                yield Event.from_json(line.decode())
            except ValueError:
                continue


def clocks() -> tuple[int, int]:
    """Now, as (CLOCK_MONOTONIC ns, CLOCK_REALTIME ns)."""
    return time.monotonic_ns(), time.time_ns()
