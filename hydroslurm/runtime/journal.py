"""What this rank writes down: a line for each event, and its status, which follows from them.

Steps are not logged as events, so between two saves only the status shows progress: its heartbeat
has the step. The training loop pays nothing: it sets an attribute, and the controller's thread
reads it.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydroslurm.coordination.world import World
from hydroslurm.core.events import Event, EventKind, EventLog, clocks
from hydroslurm.core.files import open_regular, write_atomically
from hydroslurm.core.proc import status_of
from hydroslurm.core.signals import signal_name
from hydroslurm.core.status import (
    LIMIT_BYTES,
    Moment,
    RankStatus,
    fold,
    load_status,
)
from hydroslurm.core.threads import say
from hydroslurm.gate.protocol import GateEvent
from hydroslurm.runtime.autoload import is_asked
from hydroslurm.slurm.allocation import Allocation

HEARTBEAT_ENV = "HYDROSLURM_HEARTBEAT_S"
"""Seconds between two heartbeats; 0 for none."""

DEFAULT_EVERY_S = 10.0
LEAST_EVERY_S = 0.1
_SETTLE_S = 0.0005
"""A change is written so much later: events that come together are written once."""
_RETRY_S = 1.0
_DAEMON = "slurmstepd"
_MOST_ANCESTORS = 64


def interval_s(environ: Mapping[str, str]) -> float:
    """Read HYDROSLURM_HEARTBEAT_S (0: never). Text that is no number ends no training: it gets one
    line, and the default."""
    text = environ.get(HEARTBEAT_ENV, "")
    try:
        asked_s = float(text or DEFAULT_EVERY_S)
    except ValueError:
        asked_s = float("nan")
    if asked_s != asked_s:
        say(f"{HEARTBEAT_ENV}={text[:60]!r} is no number of seconds: {DEFAULT_EVERY_S:g} are used")
        return DEFAULT_EVERY_S
    return max(asked_s, LEAST_EVERY_S) if asked_s > 0 else 0.0


@dataclass(frozen=True)
class Identity:
    """Who writes the events.

    Attributes:
        jobstep: for commands that signal the job step from outside. ``scancel`` signals job steps,
            never single processes, and the login node cannot see /proc of a compute node. So each
            rank looks once, and reports which task of how many it belongs to, and which processes
            between it and slurmstepd a signal would kill. Empty outside of a job.
    """

    rank: int
    job_id: int | None
    restart_count: int
    host: str
    jobstep: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, environ: Mapping[str, str], signals: Collection[int]) -> Identity:
        """Of this process. ``signals``: those whose default action kills."""
        allocation = Allocation.from_environ(environ)
        return cls(
            rank=World.from_environ(environ).rank,
            job_id=allocation.job_id if allocation else None,
            restart_count=allocation.restart_count if allocation else 0,
            host=socket.gethostname(),
            jobstep=_jobstep(allocation, environ, signals) if allocation else {},
        )


class RankJournal:
    """One rank's event log, and the status beside it. Any thread may :meth:`record`; the rest is
    for one thread."""

    def __init__(self, identity: Identity, log: EventLog, status: StatusWriter) -> None:
        self.identity = identity
        self.log = log
        self.status = status
        self._pid = os.getpid()
        self._last: dict[EventKind, Event] = {}
        """The newest event of each kind, in the order in which they happened."""

    def record(
        self,
        kind: EventKind,
        data: Mapping[str, object],
        *,
        step: int | None,
        mono_ns: int | None = None,
        epoch_ns: int | None = None,
    ) -> None:
        """Write an event, of now if not told otherwise."""
        now_mono_ns, now_epoch_ns = clocks()
        who = self.identity
        event = Event(
            kind=kind,
            mono_ns=now_mono_ns if mono_ns is None else mono_ns,
            epoch_ns=now_epoch_ns if epoch_ns is None else epoch_ns,
            rank=who.rank,
            job_id=who.job_id,
            restart_count=who.restart_count,
            pid=self._pid,
            host=who.host,
            step=step,
            data=dict(data),
        )
        self._last.pop(kind, None)
        self._last[kind] = event
        self.log.append(event)  # first: this line is what others wait for
        self.status.note(event)

    def end(self, data: Mapping[str, object], *, step: int | None) -> None:
        """Write that this process has left, and nothing any more."""
        self.record(EventKind.UNINSTALLED, data, step=step)
        self.log.close()
        self.status.close(step)

    def take_over(self, before: RankJournal) -> None:
        """Begin with how things stand: the newest event of each kind."""
        for event in tuple(before._last.values()):
            self.log.append(replace(event, rank=self.identity.rank))
            self.status.note(replace(event, rank=self.identity.rank))
        self._last = dict(before._last)


class StatusWriter:
    """Keeps the status file of one rank up to date.

    Any thread may :meth:`note` an event, which takes no lock; the rest is for one thread. What
    cannot be written is tried again, silently: the event log beside it warns of a disk that cannot
    be written.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        every_s: float,
        look: Callable[[int | None], Mapping[str, Any]] = lambda _: {},
    ) -> None:
        """
        Args:
            path: None writes nothing.
            every_s: 0 writes only what changes.
            look: asked at each heartbeat, with the step, for more fields of the status.
        """
        self._path = path
        self._look = look
        self._every_s = every_s
        self._events: deque[Event] = deque()
        self._changed_mono_s: float | None = None
        self._beat_mono_s = time.monotonic() + (every_s or float("inf"))
        self._seen: tuple[int, float] | None = None
        """Where the rate is measured from: a step, and when."""
        self._status: RankStatus | None = None
        if path is not None:
            try:
                self._status = load_status(path)  # of the attempt before
            except (OSError, ValueError):
                pass

    def note(self, event: Event) -> None:
        """Count one more event in; it is written soon."""
        if self._path is None:
            return
        self._events.append(event)
        if self._changed_mono_s is None:
            self._changed_mono_s = time.monotonic()

    def wait_s(self) -> float | None:
        """How long until :meth:`write` has something to do; None for never."""
        if self._path is None:
            return None
        return max(0.0, self._due_mono_s() - time.monotonic())

    def write(self, step: int | None, *, at_once: bool = False) -> None:
        """Replace the file, if something has changed or the heartbeat is due.

        Args:
            step: the training step now; without one there is no heartbeat, unless there is more to
                say.
            at_once: do not wait for what comes together with a change.
        """
        now_mono_s = time.monotonic()
        if self._path is None or not (at_once or now_mono_s >= self._due_mono_s()):
            return
        is_beat = now_mono_s >= self._beat_mono_s
        if is_beat:
            self._beat_mono_s = now_mono_s + self._every_s
        has_changed, self._changed_mono_s = self._changed_mono_s is not None, None
        # cleared before they are taken: an event that comes meanwhile sets it again
        while self._events:
            self._status = fold((self._events.popleft(),), self._status)
        more = self._look(step) if is_beat else {}
        is_beat = is_beat and not (step is None and not more)
        if self._status is None or not (has_changed or is_beat):
            return
        self._status = replace(self._status, **more)
        self._status = self._with_step(self._status, step, now_mono_s, is_beat=is_beat)
        try:
            _put(self._path, self._status.to_json().encode())
        except OSError:
            self._changed_mono_s = now_mono_s + _RETRY_S

    def close(self, step: int | None) -> None:
        """Write what has not been written yet, and nothing any more."""
        self.write(step, at_once=True)
        self._path = None

    def _due_mono_s(self) -> float:
        changed_mono_s = self._changed_mono_s
        if changed_mono_s is None:
            return self._beat_mono_s
        return min(changed_mono_s + _SETTLE_S, self._beat_mono_s)

    def _with_step(
        self, status: RankStatus, step: int | None, now_mono_s: float, *, is_beat: bool
    ) -> RankStatus:
        now = Moment(*clocks())
        status = replace(status, as_of=now, heartbeat_s=self._every_s or None)
        if step is None:
            return status
        if status.step != step or status.step_since is None:
            status = replace(status, step=step, step_since=now)
        if self._seen is None:
            self._seen = step, now_mono_s
        elif is_beat and step != self._seen[0]:
            rate = max(0.0, (step - self._seen[0]) / (now_mono_s - self._seen[1]))
            self._seen = step, now_mono_s
            status = replace(status, steps_per_s=rate)
        return status


def _put(path: Path, data: bytes) -> None:
    if len(data) > LIMIT_BYTES:
        return
    try:
        write_atomically(path, data)
    except OSError:
        # a full disk has no room for another file, but for other bytes in this one
        fd = open_regular(path, os.O_WRONLY)
        try:
            os.pwrite(fd, data.ljust(os.fstat(fd).st_size), 0)
        finally:
            os.close(fd)


class Recorder:
    """Turns the events of one process's gate into the data of lines: numbers the pauses, and makes
    latencies of timestamps. A latency begins at the stamp of the signal handler, or of the request.

    Attributes:
        pause: number of the latest pause, from 1; 0 before the first.
    """

    def __init__(self) -> None:
        self.pause = 0
        self._parked_ns = 0
        self._closed_ns = 0
        self._resume_requested_ns = 0

    def record(self, seen: GateEvent) -> dict[str, object]:
        """The data of the line that one gate event makes."""
        kind = seen.kind
        causes = seen.causes.names()
        if kind is EventKind.SIGNAL_RECEIVED:
            return {**_sender(seen), "count": seen.count}
        if kind is EventKind.GATE_CLOSED:
            self.pause += 1
            self._closed_ns, self._parked_ns = seen.mono_ns, 0
            return self._pause(causes=causes, requested_mono_ns=seen.value_ns)
        if kind in (EventKind.FIRST_OPERATOR_HELD, EventKind.LATE_OPERATOR_HELD):
            return self._pause(**_operator(seen))
        if kind is EventKind.PARKED:
            self._parked_ns = seen.mono_ns
            return self._pause(
                requested_mono_ns=seen.value_ns,
                park_us=(seen.mono_ns - seen.value_ns) / 1e3,
                held=seen.held,
                quiet=seen.quiet,
                causes=causes,
            )
        if kind is EventKind.LET_THROUGH:
            return self._pause(collectives=seen.count)
        if kind is EventKind.RESUMED:
            self._resume_requested_ns = seen.value_ns
            since_ns = self._parked_ns or self._closed_ns
            return self._pause(
                requested_mono_ns=seen.value_ns,
                parked_s=(seen.mono_ns - since_ns) / 1e9,
                held=seen.held,
                passed=seen.passed,
                causes=causes,
            )
        if kind is EventKind.FIRST_OPERATOR_RELEASED:
            return self._pause(
                requested_mono_ns=self._resume_requested_ns,
                resume_us=(seen.mono_ns - self._resume_requested_ns) / 1e3,
                tid=seen.tid,
            )
        if kind is EventKind.STOP_REQUESTED:
            return {**_sender(seen), "requested_mono_ns": seen.value_ns}
        if kind is EventKind.EVENTS_DROPPED:
            return {"count": seen.count}
        return {"causes": causes}

    def _pause(self, **data: object) -> dict[str, object]:
        return {"pause": self.pause, **data}


def _sender(seen: GateEvent) -> dict[str, object]:
    name = signal_name(seen.signo) if seen.signo else None
    return {"signal": name, "sender_pid": seen.sender_pid}


def _operator(seen: GateEvent) -> dict[str, object]:
    return {"operator": seen.text, "phase": seen.phase.name.lower(), "tid": seen.tid}


# --- of a job step
# --------------------------------------------------------------------------------------------------


def _jobstep(
    allocation: Allocation, environ: Mapping[str, str], signals: Collection[int]
) -> dict[str, object]:
    """Fields for the ``installed`` event.

    ``node_name``: Slurm's. ``step_id``: None for a process of the batch shell. ``task`` of
    ``step_tasks``. ``held``: tasks that are not installed yet survive ``signals`` too. ``deaf``:
    ancestors that would not.
    """
    node = environ.get("SLURMD_NODENAME")
    if allocation.step_id is None:
        return {"node_name": node, "step_id": None}
    # below torchrun or an agent RANK counts the ranks, and these the tasks
    return {
        "node_name": node,
        "step_id": allocation.step_id,
        "task": allocation.rank,
        "step_tasks": allocation.world_size,
        "held": is_asked(environ),
        "deaf": _deaf_ancestors(signals),
    }


def _deaf_ancestors(signals: Collection[int]) -> list[str]:
    """The processes between this one and slurmstepd that one of the signals would kill; none if
    slurmstepd is not above us, for then Slurm does not signal them."""
    found: list[str] = []
    pid = "self"
    for _ in range(_MOST_ANCESTORS):
        try:
            status = status_of(pid)
        except OSError:
            return []
        if status["Name"] == _DAEMON:
            return found
        if pid != "self" and _would_die(status, signals):
            found.append(f"{status['Name']} (pid {pid})")
        pid = status["PPid"]
    return []


def _would_die(status: Mapping[str, str], signals: Collection[int]) -> bool:
    """A blocked signal does not kill: it waits for the program that the process becomes."""
    safe = 0
    for mask in ("SigBlk", "SigIgn", "SigCgt"):
        safe |= int(status.get(mask, "0"), 16)
    return any(not safe >> (signo - 1) & 1 for signo in signals)
