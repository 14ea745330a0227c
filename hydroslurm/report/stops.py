"""The stops of a run: from the request to the commit, the queue, and the next life's first step.

A stop belongs to one rank and two of its lives: the one that was stopped, and the one that went on.
What the log does not hold is None and named in :attr:`Stop.missing`. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hydroslurm.core.events import EventKind
from hydroslurm.report.pauses import Life
from hydroslurm.report.progress import Progress

KILLED = "killed"
"""It left without a word, and another life followed."""
LEFT = "left"
"""It ended in order, and no Run said how."""
SILENT = "no more events"
"""Nothing more is known: it is still saving, or was killed and not started again."""

_REQUEUES = frozenset({"preempted", "time_limit", "requeued", "asked"})


@dataclass(frozen=True)
class Stop:
    """One stop of one rank, as far as its events tell.

    Attributes:
        rank: global rank.
        restart_count: how often the job had been requeued before the life that was stopped.
        life: its number in attempts.jsonl, from 1; None when its first lines are lost.
        signal: the first that asked it to stop; None when it was killed, asked by its program, or
            told by another rank.
        of_rank: that other rank.
        reason: why, as Slurm said: ``preempted``, ``time_limit``, ``requeued``, ``cancelled`` ...
        words: the same, for people.
        requested_mono_ns: the signal handler's stamp.
        step: steps complete when it left.
        step_from: how that is known. By ``last_event`` it is the least that it can have been.
        safe_point_ms: from the request to the end of the step that was being made.
        staged_ms: from the request until the state was copied.
        written_ms: from the request until the rank's files were on the durable tier's disk.
        durable_ms: from the request to the commit on the durable tier; 0 where that state was
            committed already.
        fast_ms: the same, on the fast tier.
        requeued_ms: from the request until Slurm had the job in its queue again.
        requeue_error: why it has not.
        state_bytes: size of the state that was committed.
        left: how it ended: a word of attempts.jsonl, ``killed``, ``left`` or ``no more events``.
        waited_s: from its last event to the first of the next life; by CLOCK_REALTIME where that
            one has another host. Slurm's wait and the start of Python.
        first_step_s: from that first event to the end of the next life's first step: imports, the
            load, and one step.
        followed: another life of the rank came after it.
        next_step: the step that this one began with.
        steps_lost: made in this life and not in the state that the next one began with; of a life
            whose ``step_from`` is ``last_event`` at least so many.
        missing: the events that this stop should have and that the log does not hold.
    """

    rank: int
    restart_count: int = 0
    life: int | None = None
    signal: str | None = None
    of_rank: int | None = None
    reason: str | None = None
    words: str | None = None
    requested_mono_ns: int | None = None
    step: int | None = None
    step_from: Literal["safe_point", "last_event"] | None = None
    safe_point_ms: float | None = None
    staged_ms: float | None = None
    written_ms: float | None = None
    durable_ms: float | None = None
    fast_ms: float | None = None
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
        have been lost yet, because no life followed."""
        if self.left == "finished" or not self.followed:
            return True
        return self.steps_lost is not None and self.step_from == "safe_point"


@dataclass(frozen=True)
class Stopped:
    """A stop with the lives that it lies between."""

    stop: Stop
    life: Life
    following: Life | None

    @property
    def begin_mono_ns(self) -> int:
        """In the clock of :attr:`life`: the request, else its last event."""
        requested = self.stop.requested_mono_ns
        return self.life.last_mono_ns if requested is None else requested


def stops_of(lives: Iterable[Life]) -> tuple[Stopped, ...]:
    """The stops in the lives of any number of ranks, which come in order of rank and time.

    A life was stopped when it was asked to stop, and when it ended without having finished and
    another one of its rank followed.
    """
    found = []
    for _, of_rank in itertools.groupby(lives, key=lambda life: life.rank):
        mine = list(of_rank)
        for life, following in itertools.zip_longest(mine, mine[1:]):
            if _was_stopped(life, following):
                found.append(Stopped(_stop(life, following), life, following))
    return tuple(found)


def steps_lost_total(stops: Iterable[Stop]) -> int:
    """Of the whole run, as far as known: ranks make the same steps, so that of the one that lost
    the most."""
    by_rank: dict[int, int] = {}
    for stop in stops:
        by_rank[stop.rank] = by_rank.get(stop.rank, 0) + (stop.steps_lost or 0)
    return max(by_rank.values(), default=0)


def _was_stopped(life: Life, following: Life | None) -> bool:
    ending = life.progress.ending if life.progress else None
    if life.stops:
        return True
    if following is None or ending == "finished":
        return False
    return ending is not None or not life.ended


def _stop(life: Life, following: Life | None) -> Stop:
    request = life.stops[0] if life.stops else None
    since_ns = None if request is None else request.requested_mono_ns
    seen = life.progress or Progress()
    left = _left(life, following)
    step, step_from = _step(seen)
    after = (following.progress if following else None) or Progress()
    return Stop(
        rank=life.rank,
        restart_count=life.restart_count,
        life=seen.life,
        signal=request.signal if request else None,
        of_rank=None if seen.stop_of_rank == life.rank else seen.stop_of_rank,
        reason=seen.reason,
        words=seen.words,
        requested_mono_ns=since_ns,
        step=step,
        step_from=step_from,
        safe_point_ms=_since_ms(since_ns, seen.safe_point_mono_ns),
        staged_ms=_since_ms(since_ns, seen.staged_mono_ns),
        written_ms=_since_ms(since_ns, seen.written_mono_ns),
        durable_ms=_committed_ms(since_ns, seen, seen.durable_mono_ns),
        fast_ms=_committed_ms(since_ns, seen, seen.fast_mono_ns),
        requeued_ms=_since_ms(since_ns, seen.requeued_mono_ns),
        requeue_error=seen.requeue_error,
        state_bytes=seen.state_bytes,
        left=left,
        waited_s=_waited_s(life, following),
        first_step_s=_first_step_s(following),
        followed=following is not None,
        next_step=after.began_step,
        steps_lost=_steps_lost(left, step, after.began_step),
        missing=tuple(kind.value for kind in _missing(life, following, left)),
    )


def _left(life: Life, following: Life | None) -> str:
    if life.progress and life.progress.ending:
        return life.progress.ending
    if life.ended:
        return LEFT
    return SILENT if following is None else KILLED


def _step(seen: Progress) -> tuple[int | None, Literal["safe_point", "last_event"] | None]:
    if seen.safe_step is not None:
        return seen.safe_step, "safe_point"
    return seen.last_step, None if seen.last_step is None else "last_event"


def _since_ms(begin_ns: int | None, end_ns: int | None) -> float | None:
    """None also when the stamps run backwards: damaged, or of something that came before."""
    if begin_ns is None or end_ns is None or end_ns < begin_ns:
        return None
    return (end_ns - begin_ns) / 1e6


def _committed_ms(begin_ns: int | None, seen: Progress, commit_ns: int | None) -> float | None:
    """A commit of the very step that was to be saved may be older than the request."""
    if begin_ns is not None and commit_ns is not None and seen.safe_step is not None:
        return max(0.0, (commit_ns - begin_ns) / 1e6)
    return _since_ms(begin_ns, commit_ns)


def _waited_s(life: Life, following: Life | None) -> float | None:
    """None where the date of another host is further back."""
    if following is None:
        return None
    gap_ns = following.epoch_ns(following.first_mono_ns) - life.epoch_ns(life.last_mono_ns)
    return gap_ns / 1e9 if gap_ns >= 0 else None


def _first_step_s(following: Life | None) -> float | None:
    if following is None or following.progress is None:
        return None
    took_ms = _since_ms(following.first_mono_ns, following.progress.first_step_mono_ns)
    return None if took_ms is None else took_ms / 1e3


def _steps_lost(left: str, step: int | None, next_step: int | None) -> int | None:
    if left == "finished":
        return 0
    if step is None or next_step is None:
        return None
    return max(0, step - next_step)


def _missing(life: Life, following: Life | None, left: str) -> Iterator[EventKind]:
    """Only what this way to leave does write: nothing of a Run where there was none, no requeue by
    a process outside of a job; one of several ranks asks Slurm for all."""
    seen = life.progress
    if seen is None or left == "error":
        return
    wanted: dict[EventKind, object] = {}
    if left != "finished":
        wanted[EventKind.STOP_REQUESTED] = life.stops or None
        asks = life.job_id is not None and (life.world_size == 1 or life.rank == 0)
        if asks:
            wanted[EventKind.STOP_REASON] = seen.reason
        wanted[EventKind.SAFE_POINT] = seen.safe_point_mono_ns
        wanted[EventKind.SAVE_COMMITTED] = _first(seen.durable_mono_ns, seen.fast_mono_ns)
        if asks and left in _REQUEUES:
            wanted[EventKind.REQUEUED] = _first(seen.requeued_mono_ns, seen.requeue_error)
        wanted[EventKind.ATTEMPT_ENDED] = seen.ending
        if following is not None:
            after = following.progress or Progress()
            wanted[EventKind.ATTEMPT_BEGAN] = after.began_step
            wanted[EventKind.FIRST_STEP] = after.first_step_mono_ns
    yield from (kind for kind, value in wanted.items() if value is None)


def _first(*values: object) -> object:
    return next((value for value in values if value is not None), None)
