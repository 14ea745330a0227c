"""What a ``Run`` wrote down in one attempt: where it began, how far it came, how it left. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydroslurm.core.events import Event, EventKind
from hydroslurm.report.lines import data_of, integer, span, stamp_of, step_of, text

OF_A_RUN = frozenset(
    {
        EventKind.ATTEMPT_BEGAN,
        EventKind.FIRST_STEP,
        EventKind.SAFE_POINT,
        EventKind.STOP_REASON,
        EventKind.SAVE_STARTED,
        EventKind.SAVE_STAGED,
        EventKind.SAVE_WRITTEN,
        EventKind.SAVE_COMMITTED,
        EventKind.SAVE_FAILED,
        EventKind.SAVE_SKIPPED,
        EventKind.SAVE_ABANDONED,
        EventKind.REQUEUE_ASKED,
        EventKind.REQUEUED,
        EventKind.REQUEUE_FAILED,
        EventKind.RUN_FINISHED,
        EventKind.ATTEMPT_ENDED,
    }
)
"""The kinds that only a ``Run`` writes."""

_OF_SAVES = {
    EventKind.SAVE_STARTED: "started_mono_ns",
    EventKind.SAVE_STAGED: "staged_mono_ns",
    EventKind.SAVE_WRITTEN: "written_mono_ns",
    EventKind.SAVE_COMMITTED: "durable_mono_ns",
    EventKind.SAVE_FAILED: "failed_mono_ns",
    EventKind.SAVE_ABANDONED: "failed_mono_ns",
}


@dataclass(slots=True)
class Save:
    """One save of one rank; stamps are CLOCK_MONOTONIC nanoseconds, None where there is no line.

    Attributes:
        step: steps complete in the state that was saved.
        kind: what it was made for: ``periodic``, ``manual``, ``stop`` ...
        started_mono_ns: it began.
        staged_mono_ns: the state was copied, and the training's memory is free to change.
        written_mono_ns: all that the rank had to write was on the disk.
        durable_mono_ns: it was committed.
        failed_mono_ns: it failed, or was given up.
        state_bytes: that were committed.
    """

    step: int | None = None
    kind: str | None = None
    started_mono_ns: int | None = None
    staged_mono_ns: int | None = None
    durable_mono_ns: int | None = None
    failed_mono_ns: int | None = None
    state_bytes: int | None = None
    written_mono_ns: int | None = None

    def note(self, name: str, mono_ns: int, size_bytes: int | None) -> None:
        """A line of it was read; the first of each kind counts."""
        if getattr(self, name) is None:
            setattr(self, name, mono_ns)
        if name == "durable_mono_ns":
            self.state_bytes = size_bytes

    @property
    def save_ms(self) -> float | None:
        """From its start to the commit."""
        return span(self.started_mono_ns, self.durable_mono_ns, 1e6)

    @property
    def end_mono_ns(self) -> int | None:
        """The last that is known of it."""
        stamps = (self.durable_mono_ns, self.failed_mono_ns, self.staged_mono_ns)
        return next((stamp for stamp in stamps if stamp is not None), None)


@dataclass(frozen=True)
class Progress:
    """What one attempt's log says of its training; what it does not hold is None.

    Stamps are CLOCK_MONOTONIC nanoseconds of the attempt's own machine.

    Attributes:
        has_run: a ``Run`` wrote any of it; if not, nothing here is known.
        attempt: number of the attempt in attempts.jsonl, from 1.
        began_step: the step that it began with.
        first_step_mono_ns: its first step was complete.
        last_step: the highest step that any line names; the attempt may have come further.
        reason: why it was stopped, in Slurm's view: ``preempted``, ``time_limit`` ...
        message: the same, for people.
        safe_point_mono_ns: the stop was obeyed.
        safe_step: steps complete there, which is the state that was to be saved.
        saved: the save of that state, which may be older than the request to stop; an empty one
            where there is none.
        requeued_mono_ns: Slurm has the job in its queue again.
        requeue_error: why not, as Slurm reports it.
        stop_of_rank: whose signal it was that the ranks agreed to stop for; None where that is not
            told, or the rank was alone.
        ending: how it ended, in the word of attempts.jsonl.
        ended_mono_ns: that was written down.
        samples_per_step: of all ranks together; None if the loader did not record it.
        saves: all of them, in the order in which they began.
    """

    has_run: bool = False
    attempt: int | None = None
    began_step: int | None = None
    first_step_mono_ns: int | None = None
    last_step: int | None = None
    reason: str | None = None
    message: str | None = None
    safe_point_mono_ns: int | None = None
    safe_step: int | None = None
    saved: Save = field(default_factory=Save)
    requeued_mono_ns: int | None = None
    requeue_error: str | None = None
    stop_of_rank: int | None = None
    ending: str | None = None
    ended_mono_ns: int | None = None
    samples_per_step: int | None = None
    saves: tuple[Save, ...] = ()

    @property
    def leave_mono_ns(self) -> int | None:
        """The training ended here: its stop was obeyed, or it was complete."""
        return self.safe_point_mono_ns or self.ended_mono_ns


class ProgressBuilder:
    """Follows one attempt, line by line, and keeps the first line of each kind."""

    def __init__(self) -> None:
        self._first: dict[EventKind, Event] = {}
        self._stop_of_rank: int | None = None
        self._last_step: int | None = None
        self._saves: dict[object, Save] = {}
        self._stop_save = Save(None, "stop")

    @property
    def has_run(self) -> bool:
        """Whether a ``Run`` wrote any of the lines so far."""
        return bool(self._first)

    def note_step(self, step: object) -> None:
        """A step that any line names."""
        if type(step) is int and (self._last_step is None or step > self._last_step):
            self._last_step = step

    def add(self, event: Event) -> None:
        """A line of one of the kinds in ``OF_A_RUN``, or of an agreed stop."""
        kind = event.kind
        if kind is EventKind.STOP_AGREED:
            if self._stop_of_rank is None:
                self._stop_of_rank = integer(data_of(event), "of_rank")
            return
        self._first.setdefault(kind, event)
        if kind in _OF_SAVES:
            self._add_save(event)

    def _add_save(self, event: Event) -> None:
        data = data_of(event)
        step, kind = integer(data, "checkpoint_step"), text(data, "save_kind")
        self.note_step(step)
        name = _OF_SAVES[event.kind]
        size = integer(data, "state_bytes")
        self._saves.setdefault(step, Save(step, kind)).note(name, event.mono_ns, size)
        if kind == "stop":
            self._stop_save.note(name, event.mono_ns, size)

    def finish(self) -> Progress:
        first = self._first
        if not self.has_run:
            return Progress()
        began, safe = first.get(EventKind.ATTEMPT_BEGAN), first.get(EventKind.SAFE_POINT)
        reason, ended = first.get(EventKind.STOP_REASON), first.get(EventKind.ATTEMPT_ENDED)
        stepped = first.get(EventKind.FIRST_STEP)
        safe_step = step_of(safe)
        # whatever it was made for; where the step is lost, the one that was made for the stop
        saved = self._saves.get(safe_step) if safe_step is not None else self._stop_save
        return Progress(
            has_run=True,
            attempt=integer(data_of(began), "attempt"),
            began_step=integer(data_of(began), "step"),
            first_step_mono_ns=stamp_of(stepped),
            last_step=self._last_step,
            reason=text(data_of(reason), "reason"),
            message=text(data_of(reason), "message"),
            safe_point_mono_ns=stamp_of(safe),
            safe_step=safe_step,
            saved=saved or Save(),
            requeued_mono_ns=stamp_of(first.get(EventKind.REQUEUED)),
            requeue_error=text(data_of(first.get(EventKind.REQUEUE_FAILED)), "reason"),
            stop_of_rank=self._stop_of_rank,
            ending=text(data_of(ended), "ending"),
            ended_mono_ns=stamp_of(ended),
            samples_per_step=_positive(integer(data_of(stepped), "samples_per_step")),
            saves=tuple(self._saves.values()),
        )


def _positive(value: int | None) -> int | None:
    return value if value is not None and value > 0 else None
