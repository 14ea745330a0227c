"""What a ``Run`` recorded in one attempt: its start, its progress, its end. Pure."""

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
"""Kinds that only a ``Run`` writes."""

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
    """One save of one rank; stamps are CLOCK_MONOTONIC nanoseconds, None without a line.

    Attributes:
        step: complete steps in the saved state.
        kind: its purpose: ``periodic``, ``manual``, ``stop`` ...
        started_mono_ns: it began.
        staged_mono_ns: the state was copied; the training may change it again.
        written_mono_ns: the rank had written its part to disk.
        durable_mono_ns: it was committed.
        failed_mono_ns: it failed, or was abandoned.
        state_bytes: committed size.
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
        """Note a line of it; the first of each kind counts."""
        if getattr(self, name) is None:
            setattr(self, name, mono_ns)
        if name == "durable_mono_ns":
            self.state_bytes = size_bytes

    @property
    def save_ms(self) -> float | None:
        """Time from start to commit."""
        return span(self.started_mono_ns, self.durable_mono_ns, 1e6)

    @property
    def end_mono_ns(self) -> int | None:
        """Its last known moment."""
        stamps = (self.durable_mono_ns, self.failed_mono_ns, self.staged_mono_ns)
        return next((stamp for stamp in stamps if stamp is not None), None)


@dataclass(frozen=True)
class Progress:
    """The training's progress in one attempt, from its log; None where that is silent.

    Stamps are CLOCK_MONOTONIC nanoseconds of the attempt's machine.

    Attributes:
        has_run: whether a ``Run`` wrote any of it; otherwise all is unknown.
        attempt: number in attempts.jsonl, from 1.
        began_step: step at its start.
        first_step_mono_ns: its first step was complete.
        last_step: highest step in any line; the attempt may have come further.
        reason: why it was stopped, by Slurm: ``preempted``, ``time_limit`` ...
        message: the same, for people.
        safe_point_mono_ns: it obeyed the stop.
        safe_step: complete steps then, in the state to be saved.
        saved: the save of that state, maybe older than the stop request; empty if there is none.
        requeued_mono_ns: Slurm had queued the job again.
        requeue_error: why it did not, by Slurm.
        stop_of_rank: the rank whose signal the ranks agreed to stop for; None if unknown, or a
            single rank.
        ending: how it ended, in the word of attempts.jsonl.
        ended_mono_ns: when that was recorded.
        samples_per_step: over all ranks; None if the loader did not record it.
        saves: all saves, in order of their start.
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
        """End of the training: it obeyed its stop, or was complete."""
        return self.safe_point_mono_ns or self.ended_mono_ns


class ProgressBuilder:
    """Follows one attempt line by line; keeps the first line of each kind."""

    def __init__(self) -> None:
        self._first: dict[EventKind, Event] = {}
        self._stop_of_rank: int | None = None
        self._last_step: int | None = None
        self._saves: dict[object, Save] = {}
        self._stop_save = Save(None, "stop")

    @property
    def has_run(self) -> bool:
        """Whether a ``Run`` has written any line so far."""
        return bool(self._first)

    def note_step(self, step: object) -> None:
        """Note a step in any line."""
        if type(step) is int and (self._last_step is None or step > self._last_step):
            self._last_step = step

    def add(self, event: Event) -> None:
        """Add a line of a kind in ``OF_A_RUN``, or of an agreed stop."""
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
        # of any kind; if the step is lost, the one made for the stop
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
