"""The attempts of a job: each start of all its replicas, how it ended, and how long the job has
held its nodes.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from hydroslurm.core.files import parse_json, read_end, read_regular, write_atomically
from hydroslurm.core.journal import append_entry, entries_of
from hydroslurm.errors import RunFolderError
from hydroslurm.jobs.supervisor.conditions import FORMAT
from hydroslurm.jobs.supervisor.exit_policy import (
    DEADLINE_EXCEEDED,
    SRUN_KILLED,
    Action,
    ExitDecision,
    FinalDecision,
)

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


def ending_of(decision: ExitDecision, final_decision: FinalDecision | None) -> Ending:
    """How an attempt ended that was not interrupted from outside."""
    if decision.action is Action.SUCCEED:
        return Ending.SUCCEEDED
    if final_decision is not None and final_decision.reason == DEADLINE_EXCEEDED:
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
        replica, status: which one failed first, and how.
        final_decision: how it ended the job; None if the job was restarted.
    """

    number: int
    restart_count: int
    began_epoch_ns: int
    srun_pid: int | None = None
    srun_started: int | None = None
    ending: Ending | None = None
    replica: str | None = None
    status: int | None = None
    ended_epoch_ns: int | None = None
    final_decision: FinalDecision | None = None


def count_restarts(attempts: Sequence[Attempt]) -> int:
    """Failed or completed attempts that another one followed: what backoffLimit allows."""
    return sum(one.ending in (Ending.FAILED, Ending.RESTARTED) for one in attempts[:-1])


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
        found = (_attempt(rows[number]) for number in sorted(rows))
        return tuple(attempt for attempt in found if attempt is not None)

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

    def started(self, attempt: Attempt, *, srun_pid: int, srun_started: int) -> Attempt:
        """Record which process runs its job step."""
        self._append(attempt, srun_pid=srun_pid, srun_started=srun_started)
        return replace(attempt, srun_pid=srun_pid, srun_started=srun_started)

    def end(
        self,
        attempt: Attempt,
        ending: Ending,
        *,
        replica: str | None = None,
        status: int | None = None,
        final_decision: FinalDecision | None = None,
    ) -> Attempt:
        """Record how it ended; of two ends the first counts."""
        self._append(
            attempt,
            ending=ending.value,
            replica=replica,
            status=status,
            ended_epoch_ns=time.time_ns(),
            final_decision=None if final_decision is None else asdict(final_decision),
        )
        return next(one for one in self.all() if one.number == attempt.number)

    def restarts(self) -> int:
        """Those that count against backoffLimit, including restarts after a success (Always)."""
        return sum(one.ending in (Ending.FAILED, Ending.RESTARTED) for one in self.all())

    def preemptions(self) -> int:
        """How many allocations ended because somebody else wanted the nodes."""
        return count_preemptions(self.all())

    def _append(self, attempt: Attempt, **facts: Any) -> None:
        try:
            append_entry(self.path, {"v": FORMAT, "number": attempt.number, **facts})
        except OSError as error:
            raise RunFolderError(f"cannot write {self.path}: {error.strerror}") from error


def _attempt(row: Mapping[str, Any]) -> Attempt | None:
    """None if a field is missing or has another type: we did not write it."""
    known = {name: row[name] for name in Attempt.__dataclass_fields__ if row.get(name) is not None}
    try:
        if "ending" in known:
            known["ending"] = Ending(known["ending"])
        if "final_decision" in known:
            known["final_decision"] = _final_decision(known["final_decision"])
        right = type(known.get("replica", "")) is str and all(
            type(known.get(name, 0)) is int for name in _NUMBERS
        )
        return Attempt(**known) if right else None
    except (TypeError, ValueError):
        return None


_NUMBERS = (
    "number",
    "restart_count",
    "began_epoch_ns",
    "srun_pid",
    "srun_started",
    "status",
    "ended_epoch_ns",
)


def _final_decision(row: Any) -> FinalDecision:
    """Read it back.

    Raises:
        TypeError: a field is missing, not known, or of another type.
    """
    found = FinalDecision(**row)
    if [type(found.failed), type(found.reason), type(found.message)] != [bool, str, str]:
        raise TypeError(f"{row!r} is no final decision")
    return found


def last_recorded(attempts_jsonl: Path) -> int:
    """The greatest attempt number that a Run has recorded; 0: none, or the file is unreadable."""
    try:
        lines = read_end(attempts_jsonl, most_bytes=_MOST_BYTES).splitlines()
    except OSError:
        return 0
    numbers = (entry.get("attempt") for entry in entries_of(lines))
    return max((number for number in numbers if type(number) is int), default=0)


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
        return float(parse_json(read_regular(path, limit_bytes=4096))["active_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
