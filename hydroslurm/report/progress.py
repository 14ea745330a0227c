"""What a ``Run`` wrote down in one life: where it began, how far it came, how it left. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hydroslurm.events import Event, EventKind
from hydroslurm.report.fields import data_of, integer, stamp_of, step_of, text

_OF_A_RUN = frozenset(
    {
        EventKind.LIFE_BEGAN,
        EventKind.FIRST_STEP,
        EventKind.SAFE_POINT,
        EventKind.STOP_REASON,
        EventKind.SAVE_STARTED,
        EventKind.SAVE_STAGED,
        EventKind.SAVE_COMMITTED,
        EventKind.SAVE_FAILED,
        EventKind.SAVE_SKIPPED,
        EventKind.SAVE_ABANDONED,
        EventKind.REQUEUE_ASKED,
        EventKind.REQUEUED,
        EventKind.REQUEUE_FAILED,
        EventKind.RUN_FINISHED,
        EventKind.LIFE_ENDED,
    }
)


@dataclass(frozen=True)
class Progress:
    """What one life's log says of its training; what it does not hold is None.

    Stamps are CLOCK_MONOTONIC nanoseconds of the life's own machine.

    Attributes:
        life: number of the life in lives.jsonl, from 1.
        began_step: the step that it began with.
        first_step_mono_ns: its first step was complete.
        last_step: the highest step that any line names; the life may have come further.
        reason: why it was stopped, in Slurm's view: ``preempted``, ``time_limit`` ...
        words: the same, for people.
        safe_point_mono_ns: the stop was obeyed.
        safe_step: steps complete there, which is the state that was to be saved.
        staged_mono_ns: that state was copied, and the training's memory is free to change.
        durable_mono_ns, fast_mono_ns: that state was committed on this tier. Before the stop was
            asked for, where it had been saved already.
        state_bytes: that were committed.
        requeued_mono_ns: Slurm has the job in its queue again.
        requeue_error: why it has not, in Slurm's words.
        stop_of_rank: whose signal it was that the ranks agreed to stop for; None where that is not
            told, or the rank was alone.
        ending: how it ended, in the word of lives.jsonl.
    """

    life: int | None = None
    began_step: int | None = None
    first_step_mono_ns: int | None = None
    last_step: int | None = None
    reason: str | None = None
    words: str | None = None
    safe_point_mono_ns: int | None = None
    safe_step: int | None = None
    staged_mono_ns: int | None = None
    durable_mono_ns: int | None = None
    fast_mono_ns: int | None = None
    state_bytes: int | None = None
    requeued_mono_ns: int | None = None
    requeue_error: str | None = None
    stop_of_rank: int | None = None
    ending: str | None = None


def progress_of(events: Sequence[Event]) -> Progress | None:
    """The events of one life; None when no ``Run`` wrote any of them."""
    first: dict[EventKind, Event] = {}
    for event in events:
        first.setdefault(event.kind, event)
    if not _OF_A_RUN & first.keys():
        return None
    began, safe = first.get(EventKind.LIFE_BEGAN), first.get(EventKind.SAFE_POINT)
    reason, ended = first.get(EventKind.STOP_REASON), first.get(EventKind.LIFE_ENDED)
    safe_step = step_of(safe)
    staged = _of_stop(events, EventKind.SAVE_STAGED, safe_step)
    durable = _of_stop(events, EventKind.SAVE_COMMITTED, safe_step, tier="durable")
    fast = _of_stop(events, EventKind.SAVE_COMMITTED, safe_step, tier="fast")
    return Progress(
        life=integer(data_of(began), "life"),
        began_step=integer(data_of(began), "step"),
        first_step_mono_ns=stamp_of(first.get(EventKind.FIRST_STEP)),
        last_step=max(_steps(events), default=None),
        reason=text(data_of(reason), "reason"),
        words=text(data_of(reason), "words"),
        safe_point_mono_ns=stamp_of(safe),
        safe_step=safe_step,
        staged_mono_ns=stamp_of(staged),
        durable_mono_ns=stamp_of(durable),
        fast_mono_ns=stamp_of(fast),
        state_bytes=integer(data_of(durable or fast), "state_bytes"),
        requeued_mono_ns=stamp_of(first.get(EventKind.REQUEUED)),
        requeue_error=text(data_of(first.get(EventKind.REQUEUE_FAILED)), "reason"),
        stop_of_rank=next(_stops_of_ranks(events), None),
        ending=text(data_of(ended), "ending"),
    )


def _stops_of_ranks(events: Iterable[Event]) -> Iterator[int]:
    for event in events:
        if event.kind is EventKind.STOP_AGREED:
            rank = integer(data_of(event), "of_rank")
            if rank is not None:
                yield rank


def _of_stop(
    events: Iterable[Event], kind: EventKind, step: int | None, *, tier: str | None = None
) -> Event | None:
    """The event of the save of this step, whatever the save was made for; where the step is lost,
    of the save that was made for the stop."""
    for event in events:
        data = data_of(event)
        if event.kind is not kind or (tier is not None and data.get("tier") != tier):
            continue
        of_stop = data.get("save_kind") == "stop"
        if of_stop if step is None else integer(data, "checkpoint_step") == step:
            return event
    return None


def _steps(events: Iterable[Event]) -> Iterable[int]:
    for event in events:
        for step in (step_of(event), integer(data_of(event), "checkpoint_step")):
            if step is not None:
                yield step
