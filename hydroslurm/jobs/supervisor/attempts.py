"""The attempts of a job: each start of all its replicas, how it ended, who stopped it, and how long
the job has held its nodes.

Attempts are numbered from 1, over restarts within an allocation and over requeues. Ranks get the
number as ``HYDROSLURM_ATTEMPT``, and a Run records it as its own. torchrun may restart its workers
within an attempt, and a Run counts those starts too; the next attempt gets the number after the
last one recorded by either, so that a number always means one start.

An attempt has an entry in the journal that is written before it begins, one with the process of its
job step, and one when it has ended. An attempt without an end is still running, or died with its
supervisor or node.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from hydroslurm.core.decoding import Seconds, decode
from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.files import append_entry, entries_of, read_end, read_regular, write_atomically
from hydroslurm.errors import RunFolderError
from hydroslurm.jobs.supervisor.conditions import FORMAT
from hydroslurm.jobs.supervisor.exit_policy import (
    DEADLINE_EXCEEDED,
    SRUN_KILLED,
    Action,
    ExitDecision,
)
from hydroslurm.slurm.policy import StopReason

_MOST_BYTES = 16 << 20
"""An attempt takes about 500 bytes."""


class Ending(str, Enum):
    """Why an attempt is over."""

    SUCCEEDED = "succeeded"
    RESTARTED = "restarted"
    """Succeeded, and restartPolicy Always restarts it."""
    FAILED = "failed"
    PREEMPTED = "preempted"
    """Preempted, requeued, or lost with its node."""
    LOST = "lost"
    """Its srun was killed, which is not the replicas' failure."""
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


def ending_of(decision: ExitDecision) -> Ending:
    """How an attempt ended that was not interrupted from outside."""
    if decision.action is Action.SUCCEED:
        return Ending.SUCCEEDED
    if decision.reason == DEADLINE_EXCEEDED:
        return Ending.DEADLINE
    if decision.reason == SRUN_KILLED:
        return Ending.LOST
    return Ending.RESTARTED if decision.status == 0 else Ending.FAILED


@dataclass(frozen=True)
class Attempt:
    """One start of all replicas.

    Attributes:
        number: from 1.
        restart_count: Slurm's.
        began_epoch_ns, ended_epoch_ns: when.
        srun_pid, srun_started: the process that runs the job step, and when it started (clock
            ticks since boot); None before that.
        ending: None while unknown.
        decision: what its end meant for the job; None if it was interrupted.
    """

    number: int
    restart_count: int
    began_epoch_ns: int
    srun_pid: int | None = None
    srun_started: int | None = None
    ending: Ending | None = None
    ended_epoch_ns: int | None = None
    decision: ExitDecision | None = None


def count_restarts(attempts: Sequence[Attempt]) -> int:
    """Failed or completed attempts that another one followed: what backoffLimit allows."""
    return sum(one.ending in (Ending.FAILED, Ending.RESTARTED) for one in attempts[:-1])


def failures(attempts: Sequence[Attempt]) -> list[ExitDecision | None]:
    """What the failed ones decided; None for others."""
    return [one.decision if one.ending is Ending.FAILED else None for one in attempts]


def count_preemptions(attempts: Sequence[Attempt]) -> int:
    """How many allocations ended because somebody else wanted the nodes."""
    return len({one.restart_count for one in attempts if one.ending is Ending.PREEMPTED})


class Attempts:
    """The attempts of one job, in a journal. Written by one supervisor at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> tuple[Attempt, ...]:
        """Oldest first; what is no attempt, or one of another version, is skipped.

        Raises:
            RunFolderError: the journal cannot be read.
        """
        try:
            lines = read_end(self.path, most_bytes=_MOST_BYTES).splitlines()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise RunFolderError(f"cannot read {self.path}: {error.strerror}") from error
        rows: dict[int, dict[str, Any]] = {}
        for entry in entries_of(lines):
            number = entry.get("number")
            if type(number) is int and entry.get("v") == FORMAT:
                rows[number] = {**entry, **rows.get(number, {})}
        found: list[Attempt] = []
        for number in sorted(rows):
            with contextlib.suppress(ValueError):  # we did not write it
                found.append(msgspec.convert(rows[number], Attempt))
        return tuple(found)

    def begin(self, restart_count: int, *, after: int = 0) -> Attempt:
        """Record durably that an attempt begins.

        Args:
            after: the greatest number in use elsewhere: :func:`last_recorded`.

        Raises:
            RunFolderError: the journal cannot be read or written.
        """
        while True:
            last = max((one.number for one in self.all()), default=0)
            attempt = Attempt(max(last, after) + 1, restart_count, time.time_ns())
            began = {"restart_count": restart_count, "began_epoch_ns": attempt.began_epoch_ns}
            self._append(attempt, **began)
            # another start may have read the journal at the same time: the first in it has the
            # number
            if attempt in self.all():
                return attempt

    def started(self, attempt: Attempt, *, srun_pid: int, srun_started: int) -> None:
        """Record which process runs its job step."""
        self._append(attempt, srun_pid=srun_pid, srun_started=srun_started)

    def end(
        self, attempt: Attempt, ending: Ending, *, decision: ExitDecision | None = None
    ) -> None:
        """Record how it ended; of two ends the first counts."""
        self._append(
            attempt,
            ending=ending.value,
            ended_epoch_ns=time.time_ns(),
            decision=None if decision is None else asdict(decision),
        )

    def _append(self, attempt: Attempt, **facts: Any) -> None:
        try:
            append_entry(self.path, {"v": FORMAT, "number": attempt.number, **facts})
        except OSError as error:
            raise RunFolderError(f"cannot write {self.path}: {error.strerror}") from error


def last_recorded(attempts_jsonl: Path) -> int:
    """The greatest attempt number that a Run has recorded; 0: none, or the file is unreadable."""
    try:
        lines = read_end(attempts_jsonl, most_bytes=_MOST_BYTES).splitlines()
    except OSError:
        return 0
    numbers = (entry.get("attempt") for entry in entries_of(lines))
    return max((number for number in numbers if type(number) is int), default=0)


_STOPS = frozenset({
    EventKind.STOP_REQUESTED,
    EventKind.REQUEUE_ASKED,
    EventKind.REQUEUED,
})  # fmt: skip


def was_stop_requested(events: Path, *, since_epoch_ns: int) -> bool:
    """Whether a rank or an agent has written down a request to stop since then.

    Args:
        events: the folder of their event files; one that cannot be read tells nothing.
    """
    for path in sorted(events.glob("*.jsonl")):
        with contextlib.suppress(OSError):
            if any(_asks(one) for one in read_events(path) if one.epoch_ns >= since_epoch_ns):
                return True
    return False


def was_requeued_by_ranks(events: Path, attempt: Attempt) -> bool:
    """Whether a rank of an attempt has had the job put back into the queue: then Slurm need not be
    asked whether it is there."""
    # the first one does it for all; where another had to, Slurm is asked
    first = sorted(events.glob("rank-*.jsonl"))[:1]
    return any(True for path in first for _ in _events_of(attempt, path, EventKind.REQUEUED))


def _events_of(attempt: Attempt, path: Path, *kinds: EventKind) -> Iterator[Event]:
    """Yield what a rank has written in an attempt; a file that cannot be read tells nothing."""
    with contextlib.suppress(OSError):
        for event in read_events(path, kinds=kinds):
            is_its = event.restart_count == attempt.restart_count
            if is_its and event.epoch_ns >= attempt.began_epoch_ns:
                yield event


def recorded_stop_reason(events: Path, attempt: Attempt) -> tuple[StopReason, str] | None:
    """Why the ranks of an attempt were stopped, as the first of them that Slurm has told wrote it
    down; None where none has. A rank asks as soon as it is signalled. Later, when it has had the
    job requeued, a preemption, a person's signal and an operator's requeue look the same to Slurm.
    """
    found: list[tuple[int, StopReason, str]] = []
    for path in sorted(events.glob("rank-*.jsonl")):
        signal = ""
        for event in _events_of(attempt, path, EventKind.STOP_REQUESTED, EventKind.STOP_REASON):
            if event.kind is EventKind.STOP_REQUESTED:
                signal = signal or str(event.data.get("signal") or "")
            elif (reason := event.data.get("reason")) in _REASONS:
                came = f"{signal} received: " if signal else ""
                message = f"{came}{event.data.get('message', '')}"
                found.append((event.epoch_ns, StopReason(reason), message))
    return min(found)[1:] if found else None


def condition_reason(reason: StopReason | None) -> str:
    """For a condition; None where Slurm has only said that the job goes on later."""
    return (reason or StopReason.REQUEUED).value.title().replace("_", "")


_REASONS = frozenset(one.value for one in StopReason) - {"unknown", "cancelled"}
"""Those with which a job may go on later."""


def _asks(event: Event) -> bool:
    if event.kind is EventKind.SIGNAL_PASSED_ON:
        return event.data.get("meaning") in ("stop", "warning")
    return event.kind in _STOPS


LONGEST_TICK_S = 2.0
"""Time beyond this between two ticks was spent suspended."""
WRITE_EVERY_S = 5.0


class ActiveTime:
    """How long the job has held its nodes, without suspensions; kept in a file."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.seconds = _read(path)
        self._clock = clock
        self._ticked_mono_s = self._written_mono_s = clock()

    def tick(self) -> float:
        """Count up to now; returns the seconds so far."""
        now_s = self._clock()
        self.seconds += min(now_s - self._ticked_mono_s, LONGEST_TICK_S)
        self._ticked_mono_s = now_s
        if now_s - self._written_mono_s > WRITE_EVERY_S:
            self.write()
        return self.seconds

    def write(self) -> None:
        """Write the file; without it the time since the last write is lost at a restart."""
        self._written_mono_s = self._clock()
        with contextlib.suppress(OSError):
            write_atomically(self.path, json.dumps({"active_s": round(self.seconds, 3)}))


def _read(path: Path) -> float:
    try:
        return decode(dict[str, Seconds], read_regular(path, limit_bytes=4096))["active_s"]
    except (OSError, ValueError, KeyError):
        return 0.0
