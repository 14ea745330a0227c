"""The stops of a run: from the request to the commit, the queue, and the next attempt's first step.

A stop belongs to one rank and two of its attempts: the one that was stopped, and the one that
followed. What is missing from the log is None and named in :attr:`Stop.missing`. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hydroslurm.core.events import EventKind
from hydroslurm.report.attempts import Attempt
from hydroslurm.report.lines import span
from hydroslurm.report.progress import Progress

KILLED = "killed"
"""It left no further events, and another attempt followed."""
LEFT = "left"
"""It ended in order, and no Run recorded how."""
SILENT = "no more events"
"""Nothing more is known: it is still saving, or was killed and not restarted."""

_REQUEUES = frozenset({"preempted", "time_limit", "requeued", "asked"})


@dataclass(frozen=True)
class Stop:
    """One stop of one rank, as far as its events tell.

    Attributes:
        rank: global rank.
        restart_count: how often the job had been requeued before the attempt that was stopped.
        attempt: its number in attempts.jsonl, from 1; None when its first lines are lost.
        signal: the first that asked it to stop; None when it was killed, asked by its program, or
            told by another rank.
        of_rank: that other rank.
        reason: why, as Slurm said: ``preempted``, ``time_limit``, ``requeued``, ``cancelled`` ...
        message: the same, for people.
        requested_mono_ns: the signal handler's stamp.
        step: steps complete when it left.
        step_from: how that is known. By ``last_event`` it is the least that it can have been.
        safe_point_ms: from the request to the end of the step that was being made.
        staged_ms: from the request until the state was copied; None where none was, as a stop
            writes the state itself.
        written_ms: from the request until the rank's files were on the disk.
        durable_ms: from the request to the commit; 0 where that state was
            committed already.
        requeued_ms: from the request until Slurm had the job in its queue again.
        requeue_error: why it has not.
        state_bytes: size of the state that was committed.
        left: how it ended: a word of attempts.jsonl, ``killed``, ``left`` or ``no more events``.
        waited_s: from its last event to the first of the next attempt; by CLOCK_REALTIME where that
            one has another host. Slurm's wait and the start of Python.
        first_step_s: from that first event to the end of the next attempt's first step: imports,
            the load, and one step.
        followed: another attempt of the rank came after it.
        next_step: the step that this one began with.
        steps_lost: made in this attempt, but not in the state that the next one began with. If
            ``step_from`` is ``last_event``, at least this many.
        missing: the events that this stop should have and that the log does not hold.
    """

    rank: int
    restart_count: int = 0
    attempt: int | None = None
    signal: str | None = None
    of_rank: int | None = None
    reason: str | None = None
    message: str | None = None
    requested_mono_ns: int | None = None
    step: int | None = None
    step_from: Literal["safe_point", "last_event"] | None = None
    safe_point_ms: float | None = None
    staged_ms: float | None = None
    written_ms: float | None = None
    durable_ms: float | None = None
    requeued_ms: float | None = None
    requeue_error: str | None = None
    state_bytes: int | None = None
    left: str = SILENT
    waited_s: float | None = None
    first_step_s: float | None = None
    followed: bool = False
    next_step: int | None = None
    steps_lost: int | None = None
    missing: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def steps_lost_exactly(self) -> bool:
        """False where more may have been lost than :attr:`steps_lost` says; True where nothing can
        have been lost yet, because no attempt followed."""
        if self.left == "finished" or not self.followed:
            return True
        return self.steps_lost is not None and self.step_from == "safe_point"


@dataclass(frozen=True)
class Stopped:
    """A stop with the attempts that it lies between."""

    stop: Stop
    attempt: Attempt
    following: Attempt | None

    @property
    def begin_mono_ns(self) -> int:
        """In the clock of :attr:`attempt`: the request, else its last event."""
        requested = self.stop.requested_mono_ns
        return self.attempt.last_mono_ns if requested is None else requested


def stops_of(attempts: Iterable[Attempt]) -> tuple[Stopped, ...]:
    """The stops in the attempts of any number of ranks, which come in order of rank and time.

    An attempt was stopped when it was asked to stop, and when it ended without having finished and
    another one of its rank followed.
    """
    found = []
    for _, of_rank in itertools.groupby(attempts, key=lambda attempt: attempt.rank):
        mine = list(of_rank)
        for attempt, following in itertools.zip_longest(mine, mine[1:]):
            if _was_stopped(attempt, following):
                found.append(Stopped(_stop(attempt, following), attempt, following))
    return tuple(found)


def steps_lost_total(stops: Iterable[Stop]) -> int:
    """Of the whole run, as far as known: ranks make the same steps, so that of the one that lost
    the most."""
    by_rank: dict[int, int] = {}
    for stop in stops:
        by_rank[stop.rank] = by_rank.get(stop.rank, 0) + (stop.steps_lost or 0)
    return max(by_rank.values(), default=0)


def _was_stopped(attempt: Attempt, following: Attempt | None) -> bool:
    ending = attempt.progress.ending
    if attempt.stops:
        return True
    if following is None or ending == "finished":
        return False
    return ending is not None or not attempt.ended


def _stop(attempt: Attempt, following: Attempt | None) -> Stop:
    request = attempt.stops[0] if attempt.stops else None
    since_ns = None if request is None else request.requested_mono_ns
    seen = attempt.progress
    left = _left(attempt, following)
    step, step_from = _step(seen)
    after = following.progress if following else Progress()
    return Stop(
        rank=attempt.rank,
        restart_count=attempt.restart_count,
        attempt=seen.attempt,
        signal=request.signal if request else None,
        of_rank=None if seen.stop_of_rank == attempt.rank else seen.stop_of_rank,
        reason=seen.reason,
        message=seen.message,
        requested_mono_ns=since_ns,
        step=step,
        step_from=step_from,
        safe_point_ms=span(since_ns, seen.safe_point_mono_ns, 1e6),
        staged_ms=span(since_ns, seen.saved.staged_mono_ns, 1e6),
        written_ms=span(since_ns, seen.saved.written_mono_ns, 1e6),
        durable_ms=_committed_ms(since_ns, seen, seen.saved.durable_mono_ns),
        requeued_ms=span(since_ns, seen.requeued_mono_ns, 1e6),
        requeue_error=seen.requeue_error,
        state_bytes=seen.saved.state_bytes,
        left=left,
        waited_s=_waited_s(attempt, following),
        first_step_s=_first_step_s(following),
        followed=following is not None,
        next_step=after.began_step,
        steps_lost=_steps_lost(left, step, after.began_step),
        missing=tuple(kind.value for kind in _missing(attempt, following, left)),
    )


def _left(attempt: Attempt, following: Attempt | None) -> str:
    if attempt.progress.ending:
        return attempt.progress.ending
    if attempt.ended:
        return LEFT
    return SILENT if following is None else KILLED


def _step(seen: Progress) -> tuple[int | None, Literal["safe_point", "last_event"] | None]:
    if seen.safe_step is not None:
        return seen.safe_step, "safe_point"
    return seen.last_step, None if seen.last_step is None else "last_event"


def _committed_ms(begin_ns: int | None, seen: Progress, commit_ns: int | None) -> float | None:
    """A commit of the very step that was to be saved may be older than the request."""
    if begin_ns is not None and commit_ns is not None and seen.safe_step is not None:
        return max(0.0, (commit_ns - begin_ns) / 1e6)
    return span(begin_ns, commit_ns, 1e6)


def _waited_s(attempt: Attempt, following: Attempt | None) -> float | None:
    """None where the date of another host is further back."""
    if following is None:
        return None
    gap_ns = following.epoch_ns(following.first_mono_ns) - attempt.epoch_ns(attempt.last_mono_ns)
    return gap_ns / 1e9 if gap_ns >= 0 else None


def _first_step_s(following: Attempt | None) -> float | None:
    if following is None:
        return None
    return span(following.first_mono_ns, following.progress.first_step_mono_ns, 1e9)


def _steps_lost(left: str, step: int | None, next_step: int | None) -> int | None:
    if left == "finished":
        return 0
    if step is None or next_step is None:
        return None
    return max(0, step - next_step)


def _missing(attempt: Attempt, following: Attempt | None, left: str) -> Iterator[EventKind]:
    """Only what this way to leave does write: nothing of a Run where there was none, no requeue by
    a process outside of a job; one of several ranks asks Slurm for all."""
    seen = attempt.progress
    if not seen.has_run or left == "error":
        return
    wanted: dict[EventKind, object] = {}
    if left != "finished":
        wanted[EventKind.STOP_REQUESTED] = attempt.stops or None
        asks = attempt.job_id is not None and (attempt.world_size == 1 or attempt.rank == 0)
        if asks:
            wanted[EventKind.STOP_REASON] = seen.reason
        wanted[EventKind.SAFE_POINT] = seen.safe_point_mono_ns
        wanted[EventKind.SAVE_COMMITTED] = seen.saved.durable_mono_ns
        if asks and left in _REQUEUES:
            # a stamp of 0 is one, too
            asked = seen.requeued_mono_ns
            wanted[EventKind.REQUEUED] = seen.requeue_error if asked is None else asked
        wanted[EventKind.ATTEMPT_ENDED] = seen.ending
        if following is not None:
            wanted[EventKind.ATTEMPT_BEGAN] = following.progress.began_step
            wanted[EventKind.FIRST_STEP] = following.progress.first_step_mono_ns
    yield from (kind for kind, value in wanted.items() if value is None)
