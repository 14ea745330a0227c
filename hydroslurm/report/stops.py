"""The stops of a run: request, commit, queue, and the next attempt's first step.

A stop belongs to one rank and two of its attempts: the stopped one and its successor. Values
missing from the log are None and named in :attr:`Stop.missing`. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hydroslurm.core.events import EventKind
from hydroslurm.core.figure import figure, required
from hydroslurm.report.attempts import Attempt
from hydroslurm.report.lines import span
from hydroslurm.report.progress import Progress

KILLED = "killed"
"""It left no further events, and another attempt followed."""
LEFT = "left"
"""It ended in order, but no Run recorded how."""
SILENT = "no more events"
"""Unknown: it is still saving, or was killed and not restarted."""

_REQUEUES = frozenset({"preempted", "time_limit", "requeued", "asked"})


@dataclass(frozen=True)
class SlurmAttempt:
    """One attempt of a job in Slurm's accounting; seconds since 1970, null where unknown."""

    # fmt: off
    job_id: int = required("Its own number, as its processes know it.")
    number: int = required("Earlier attempts, as far as accounting has them.")
    state: str = required("How it ended (`REQUEUED`, `PREEMPTED` ...), or its current state.")
    submit_epoch_s: int | None = figure("When it was submitted, or requeued.")
    eligible_epoch_s: int | None = figure("When it became eligible to start.")
    start_epoch_s: int | None = figure("When its nodes were allocated.")
    end_epoch_s: int | None = figure("When they were released; null while it runs.")
    suspended_s: int | None = figure("How long it was suspended in total.")
    name: str = figure("What Slurm calls the job: `44_3` for an element of an array.", default="")
    # fmt: on


def _why(stop: Stop) -> str:
    """Return Slurm's reason, and how the attempt ended if that differs."""
    if stop.left == KILLED:
        return f"{stop.reason}, killed" if stop.reason else KILLED
    if stop.reason in (None, "unknown"):
        source = stop.left if stop.of_rank is None else f"rank {stop.of_rank}"
        return stop.signal or source
    return f"{stop.reason}, {stop.left}" if stop.left == "finished" else str(stop.reason)


def _step(stop: Stop) -> str | None:
    if stop.step is None:
        return None
    return f"{'≥ ' if stop.step_from == 'last_event' else ''}{stop.step:,}"


def _lost(stop: Stop) -> str | None:
    """Mark a lower bound."""
    if stop.steps_lost is None:
        return None
    return f"{'' if stop.steps_lost_exactly else '≥ '}{stop.steps_lost:,}"


def _not_in_the_log(stop: Stop) -> str | None:
    return ", ".join(stop.missing) or None


@dataclass(frozen=True, kw_only=True)
class Stop:
    """One stop of one rank, as far as its events and other sources tell.

    If only the log was read, these are null: ``at_s``, ``left_s``, and the values of Slurm and
    nsys.
    """

    # fmt: off
    at_s: float = figure("Since the run's first event.", "at\n(s)", ",.1f", default=0.0)
    rank: int = required("Global rank.", "rank", "d")
    restart_count: int = figure(
        "How often the job had been requeued before the attempt that was stopped.", default=0)
    attempt: int | None = figure(
        "Its number in attempts.jsonl, from 1; null when its first lines are lost.", "attempt", "d")
    reason: str | None = figure(
        "Why, as Slurm said: `preempted`, `time_limit`, `requeued`, `cancelled` ...",
        "stopped by", cell=_why, left=True)
    message: str | None = figure("The same, for people.")
    signal: str | None = figure(
        "The first that asked it to stop; null when it was killed, asked by its program, or told "
        "by another rank.",
        "signal", left=True, more=True)
    of_rank: int | None = figure("That other rank.")
    requested_mono_ns: int | None = figure("The signal handler's stamp.")
    safe_point_ms: float | None = figure(
        "From the request to the end of the step that was being made.",
        "safe\npoint\n(ms)", ",.0f", label="signal → safe point")
    nsys_saving_ms: float | None = figure(
        "From the request to the start of the snapshot, by nsys.",
        "saving, nsys (ms)", ",.1f", more=True)
    staged_ms: float | None = figure(
        "From the request until the state was copied; null where none was, as a stop writes the "
        "state itself.")
    written_ms: float | None = figure(
        "From the request until the rank's files were on the disk.",
        "written (ms)", ",.0f", label="signal → files written", more=True)
    nsys_durable_ms: float | None = figure(
        "From the request to parts on disk, or to the save's failure, by nsys.")
    durable_ms: float | None = figure(
        "From the request to the commit; 0 where that state was committed already.",
        "saved\n(ms)", ",.0f", label="signal → committed")
    nsys_committed_ms: float | None = figure(
        "From the request to the commit, by nsys.", "saved, nsys (ms)", ",.1f", more=True)
    requeued_ms: float | None = figure(
        "From the request until Slurm had the job in its queue again.",
        "re-\nqueued\n(ms)", ",.0f", label="signal → requeued")
    nsys_requeued_ms: float | None = figure(
        "From the request until Slurm had the job again, by nsys.",
        "requeued, nsys (ms)", ",.1f", more=True)
    requeue_error: str | None = figure("Why it has not.")
    left: str = figure(
        "How it ended: a word of attempts.jsonl, `killed`, `left` or `no more events`.",
        default=SILENT)
    left_s: float | None = figure(
        "From the request to the last event.", "left (ms)", ",.0f", unit=1e-3, more=True)
    slurm_before: SlurmAttempt | None = figure(
        "The attempt that was stopped, in Slurm's accounting.")
    slurm_after: SlurmAttempt | None = figure("The one that followed.")
    eligible_s: float | None = figure(
        "From the end of the attempt to the moment when the next one might start.",
        "eligible (s)", ",.0f", label="end → eligible", more=True)
    queued_s: float | None = figure(
        "From then to its start.", "start (s)", ",.0f", label="eligible → started", more=True)
    start_s: float | None = figure(
        "From its start to the process's first event: srun, Python, imports.",
        "runs (s)", ",.1f", label="started → first event", more=True)
    waited_s: float | None = figure(
        "From its last event to the first of the next attempt; by CLOCK_REALTIME where that one "
        "has another host. Slurm's wait and the start of Python.",
        "next\nbegan\n(s)", ",.1f", label="end → next attempt")
    first_step_s: float | None = figure(
        "From that first event to the end of the next attempt's first step: imports, the load, "
        "and one step.",
        "first\nstep\n(s)", ",.1f", label="next attempt → first step")
    followed: bool = figure("Another attempt of the rank came after it.", default=False)
    step: int | None = figure("Steps complete when it left.", "at\nstep", cell=_step)
    step_from: Literal["safe_point", "last_event"] | None = figure(
        "How that is known. By `last_event` it is the least that it can have been.")
    next_step: int | None = figure("The step that the next attempt began with.")
    steps_lost: int | None = figure(
        "Made in this attempt, but not in the state that the next one began with. If `step_from` "
        "is `last_event`, at least this many.",
        "steps\nlost", cell=_lost)
    samples_lost: int | None = figure(
        "With the steps; null where the loader does not record how many a step has.",
        "samples lost", ",d", more=True)
    state_bytes: int | None = figure(
        "Size of the state that was committed.", "state (MB)", ",.1f", unit=1e6, more=True)
    missing: tuple[str, ...] = figure(
        "The events that this stop should have and that the log does not hold.",
        "not in the log", cell=_not_in_the_log, left=True, more=True, default=())
    # fmt: on

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def steps_lost_exactly(self) -> bool:
        """False if more steps may be lost than :attr:`steps_lost` says; True while no attempt has
        followed, so nothing can be lost yet."""
        if self.left == "finished" or not self.followed:
            return True
        return self.steps_lost is not None and self.step_from == "safe_point"


@dataclass(frozen=True)
class Stopped:
    """A stop with the attempts before and after it."""

    stop: Stop
    attempt: Attempt
    following: Attempt | None

    @property
    def begin_mono_ns(self) -> int:
        """In the clock of :attr:`attempt`: the request, else its last event."""
        requested = self.stop.requested_mono_ns
        return self.attempt.last_mono_ns if requested is None else requested


def stops_of(attempts: Iterable[Attempt]) -> tuple[Stopped, ...]:
    """Return the stops in the attempts of any number of ranks, given by rank and time.

    An attempt was stopped if it was asked to, or if it ended unfinished and another attempt of its
    rank followed.
    """
    stopped = []
    for _, of_rank in itertools.groupby(attempts, key=lambda attempt: attempt.rank):
        own = list(of_rank)
        for attempt, following in itertools.zip_longest(own, own[1:]):
            if _was_stopped(attempt, following):
                stopped.append(Stopped(_stop(attempt, following), attempt, following))
    return tuple(stopped)


def steps_lost_total(stops: Iterable[Stop]) -> int:
    """Return the run's lost steps, as far as known: those of the rank that lost most, since ranks
    take steps together."""
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
    step, step_from = _step_of(seen)
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


def _step_of(seen: Progress) -> tuple[int | None, Literal["safe_point", "last_event"] | None]:
    if seen.safe_step is not None:
        return seen.safe_step, "safe_point"
    return seen.last_step, None if seen.last_step is None else "last_event"


def _committed_ms(begin_ns: int | None, seen: Progress, commit_ns: int | None) -> float | None:
    """Return the time to commit; the very step to save may have been committed before."""
    if begin_ns is not None and commit_ns is not None and seen.safe_step is not None:
        return max(0.0, (commit_ns - begin_ns) / 1e6)
    return span(begin_ns, commit_ns, 1e6)


def _waited_s(attempt: Attempt, following: Attempt | None) -> float | None:
    """None if another host's date is further back."""
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
    """Return only events that this ending writes: none of a Run without one, no requeue outside
    of a job; one of several ranks asks Slurm for all."""
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
            # 0 is also a stamp
            asked = seen.requeued_mono_ns
            wanted[EventKind.REQUEUED] = seen.requeue_error if asked is None else asked
        wanted[EventKind.ATTEMPT_ENDED] = seen.ending
        if following is not None:
            wanted[EventKind.ATTEMPT_BEGAN] = following.progress.began_step
            wanted[EventKind.FIRST_STEP] = following.progress.first_step_mono_ns
    yield from (kind for kind, value in wanted.items() if value is None)
