"""The pauses of one process, as values, built from the lines of the log. Pure.

A pause with lost lines (killed process, full disk) is still a :class:`Pause`: unknown values are
None, and :attr:`Pause.missing` names them. Timestamps are CLOCK_MONOTONIC nanoseconds of the
process's host.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.figure import figure, required
from hydroslurm.core.files import clean
from hydroslurm.report.lines import (
    data_of,
    first_integer,
    integer,
    number,
    span,
    stamp_of,
    step_of,
    text,
)
from hydroslurm.report.tables import UNKNOWN
from hydroslurm.report.tables import number as decimal

PEERS, VACATED = "peers", "vacated"

Outcome = Literal["complete", "withdrawn", "not resumed", "not parked", "incomplete"]


_ASKED, _PARK, _RESUME = "requested_mono_ns", "signal → parked", "resume → running"


def _causes(pause: Pause) -> str:
    """Format its own causes; peers always join them."""
    own = [cause for cause in pause.causes if cause != PEERS]
    return "+".join(own or pause.causes) or UNKNOWN


def _all_parked(pause: Pause) -> str | None:
    """Mark pauses with collectives in flight."""
    text = decimal(pause.all_parked_us, ",.1f", 1e3)
    return f"{text or UNKNOWN} !" if pause.in_flight else text


def _vacated_gb(pause: Pause) -> str | None:
    """Show a dash for a pause that should have vacated and did not."""
    return decimal(pause.vacated_bytes, ",.2f", 1e9) or (UNKNOWN if pause.not_vacated else None)


def _sigstop(pause: Pause) -> str | None:
    return None if pause.stopped_us is None else f"≈ {pause.stopped_us / 1e6:.0f}"


def _held_at(pause: Pause) -> str:
    """Say where the rank was held, or what is wrong with this pause."""
    if pause.outcome == "incomplete":
        return f"lost: {', '.join(pause.missing)}"
    if not pause.complete:
        return pause.outcome
    if pause.operator is None:
        return "(quiet)"
    # autograd names its own "autograd::engine::evaluate_function: AddmmBackward0"
    operator = pause.operator.rpartition(": ")[2]
    return f"{operator} (backward)" if pause.phase == "backward" else operator


@dataclass(frozen=True, slots=True)
class Profiled:
    """The pause in an nsys report; null if not in it."""

    # fmt: off
    park_us: float | None = required(
        "As that of the log.", "parked, nsys (µs)", ",.0f", label=_PARK, more=True)
    last_kernel_us: float | None = required(
        "From the request to the end of the last kernel before the pause.",
        "last kernel (µs)", ",.0f", label="signal → last kernel's end", more=True)
    drain_us: float | None = required(
        "As that of the log.", "drained, nsys (µs)", ",.0f", more=True)
    resume_us: float | None = required(
        "As that of the log.", "runs, nsys (µs)", ",.0f", label=_RESUME, more=True)
    first_kernel_us: float | None = required(
        "From the resume request to the start of the first kernel after it.",
        "first kernel (µs)", ",.0f", label="resume → first kernel", more=True)
    difference_us: float | None = required(
        "The largest of the differences to the log's own.",
        "largest difference (µs)", ",.0f", label="difference to the log, at most", more=True)
    error_us: float | None = required(
        "By how much moments that nsys timed may be wrong.", "nsys clock ± (µs)", ",.0f", more=True)
    # fmt: on


@dataclass(frozen=True, slots=True)
class Pause:
    """One pause of one rank, as far as its events and other sources tell.

    If only the log was read, these are null: ``at_s``, ``asked_us``, ``stopped_us``, ``nsys``.
    """

    # fmt: off
    at_s: float | None = required(
        "From the run's first event to the request; null without any timestamp.", "at\n(s)", ",.2f")
    rank: int = required("Global rank.", "rank", "d")
    number: int = required("1, 2, ... within one attempt.", "pause", "d")
    restart_count: int = required("How often the job had been requeued before this attempt.")
    pid: int = required("Of the rank.")
    causes: tuple[str, ...] = figure(
        "Why, in order of appearance: `slurm`, `user`, `api`, `terminal`; `peers`: because "
        "another rank of the job was paused.",
        "cause", cell=_causes, left=True, default=())
    signal: str | None = figure(
        "The signal that asked for it, null for a call of `pause()`.",
        "signal", left=True, more=True)
    step: int | None = figure(
        "Training step when the gate closed, null if unknown.", "step", ",d", more=True)
    requested_mono_ns: int | None = figure("The signal handler's stamp, or that of the call.")
    asked_us: float | None = figure(
        "Signal of the rank that was signalled -> this rank was told, µs, by aligned dates; null "
        "for a rank that had a cause of its own.",
        "asked (ms)", ".2f", unit=1e3, more=True)
    closed_mono_ns: int | None = figure(
        "The gate was armed.", "closed (µs)", ",.0f", unit=1e3, since=_ASKED, more=True)
    held_mono_ns: int | None = figure(
        "The first operator was held; null when the rank was quiet.",
        "held (µs)", ",.0f", unit=1e3, since=_ASKED, more=True)
    parked_mono_ns: int | None = figure(
        "No training thread issues anything any more, for the first time. A rank that is let "
        "through to a collective of its peers parks again.")
    park_us: float | None = figure(
        "From the request to parked.", "signal →\nparked\n(µs)", ",.0f", label=_PARK)
    all_parked_mono_ns: int | None = figure(
        "Every rank learned that all of them are parked, at the same collectives; null for a rank "
        "that is alone, and where that was not reached.")
    all_parked_us: float | None = figure(
        "From the request, at this rank, until all ranks were parked.",
        "all\nparked\n(ms)", ",.0f", label="signal → all ranks parked", cell=_all_parked,
        optional=True)
    in_flight: int | None = figure(
        "Collectives that were in flight then; or when the ranks gave up coming together.")
    let_through: int = figure("Collectives that this rank was let through on its way.", default=0)
    drained_mono_ns: int | None = figure(
        "The devices have finished what was launched; null without devices.")
    drain_us: float | None = figure(
        "How long the devices took to finish what was launched.",
        "drained (µs)", ",.0f", label="parked → devices idle", more=True)
    undrained_s: float | None = figure(
        "How long they were waited for in vain; null when they drained or there are none.")
    vacated_mono_ns: int | None = figure(
        "Device memory was on the host; null where it was not moved.")
    vacated_bytes: int | None = figure(
        "How much.", "vacated\n(GB)", cell=_vacated_gb, optional=True)
    vacate_s: float | None = figure(
        "How long that took, in the rank's own words.", "vacate\n(s)", ",.2f", optional=True)
    not_vacated: str | None = figure("Why a pause that was to vacate did not.")
    stopped_us: float | None = figure(
        "Request -> SIGSTOP, µs, according to the site's suspend grace; null where Slurm did not "
        "suspend, or the resume came sooner.",
        "SIGSTOP (s)", cell=_sigstop, more=True)
    parked_s: float | None = figure(
        "From parked to the opening of the gate.", "parked\n(s)", ",.3f", label="parked")
    resume_requested_mono_ns: int | None = figure(
        "The stamp of the request that opened the gate; of a pause that vacated, of the one that "
        "has its memory given back first.",
        "resume (s)", ",.3f", unit=1e9, since=_ASKED, more=True)
    restored_mono_ns: int | None = figure("Device memory was back; null where it was not moved.")
    restore_s: float | None = figure(
        "How long that took, in the rank's own words.", "restore\n(s)", ",.2f", optional=True)
    resumed_mono_ns: int | None = figure(
        "The gate was opened.",
        "opened (µs)", ",.0f", unit=1e3, since="resume_requested_mono_ns", more=True)
    released_mono_ns: int | None = figure("The first thread that was held runs again.")
    resume_us: float | None = figure(
        "From the request to the first thread that runs; when no thread was held, to the open "
        "gate.",
        "resume →\nrunning\n(µs)", ",.0f", label=_RESUME)
    operator: str | None = figure(
        "The first operator that was held, such as `aten::linear`.",
        "held at", cell=_held_at, left=True)
    phase: str | None = figure("`forward` or `backward`: where that operator was met.")
    outcome: Outcome = figure(
        "What became of it; `withdrawn`: resumed before it had parked.", default="complete")
    missing: tuple[str, ...] = figure(
        "The events that this pause should have and that the log does not hold.", default=())
    nsys: Profiled | None = figure("The same pause in an nsys profile.")
    # fmt: on

    def __reduce__(self) -> tuple[type[Pause], tuple[object, ...]]:
        """Speed up pickling a hundred thousand: dataclass's own takes three times as long."""
        return Pause, _values_of(self)

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def main_cause(self) -> str | None:
        """First cause other than ``peers``, else ``peers``; None if the causes are lost."""
        for cause in self.causes:
            if cause != PEERS:
                return cause
        return self.causes[0] if self.causes else None

    @property
    def begin_mono_ns(self) -> int | None:
        """The earliest known timestamp."""
        stamps = (self.requested_mono_ns, self.closed_mono_ns, self.held_mono_ns)
        later = (self.parked_mono_ns, self.resume_requested_mono_ns, self.resumed_mono_ns)
        return next((stamp for stamp in (*stamps, *later) if stamp is not None), None)


_values_of = attrgetter(*(field.name for field in fields(Pause)))


_OPEN = 16
"""How many pauses wait for late lines: of another thread, or one released after the next pause has
begun."""

_MOST_CAUSES = 16

OF_PAUSES = frozenset(
    {
        EventKind.SIGNAL_RECEIVED,
        EventKind.CAUSES_CHANGED,
        EventKind.GATE_CLOSED,
        EventKind.FIRST_OPERATOR_HELD,
        EventKind.LATE_OPERATOR_HELD,
        EventKind.PARKED,
        EventKind.LET_THROUGH,
        EventKind.ALL_PARKED,
        EventKind.AGREEMENT_FAILED,
        EventKind.DRAINED,
        EventKind.NOT_DRAINED,
        EventKind.VACATED,
        EventKind.NOT_VACATED,
        EventKind.RESTORED,
        EventKind.RESUMED,
        EventKind.FIRST_OPERATOR_RELEASED,
    }
)
"""Kinds of events for a :class:`PausesBuilder`."""


@dataclass(slots=True)
class _PauseBuilder:
    """Collects the lines of a pause: the first of each kind."""

    number: int
    events: dict[EventKind, Event] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    signals: tuple[Event, ...] = ()
    let_go: Event | None = None
    """Whether only its own vacate still holds the rank."""

    def add(self, event: Event) -> None:
        kind = event.kind
        if kind not in self.events:
            self.events[kind] = event
        if kind is not EventKind.RESUMED and "causes" in event.data:
            self.add_causes(event)

    def add_causes(self, event: Event) -> None:
        causes = event.data.get("causes")
        if isinstance(causes, list):
            self.let_go = event if causes == [VACATED] else None
            for cause in causes[:_MOST_CAUSES]:
                if isinstance(cause, str) and clean(cause) not in self.causes:
                    self.causes.append(clean(cause))
            del self.causes[_MOST_CAUSES:]


class PausesBuilder:
    """Collects by number, not order: a thread may be released after the next pause has begun."""

    def __init__(self) -> None:
        self._done: list[Pause] = []
        self._done_up_to = -1
        self._open: dict[int, _PauseBuilder] = {}
        self._current: _PauseBuilder | None = None
        self._signals: deque[Event] = deque(maxlen=_OPEN)
        self._of_all: deque[Event] = deque(maxlen=2 * _OPEN)

    def add(self, event: Event) -> None:
        """Add a line of a kind in ``OF_PAUSES``."""
        which = integer(event.data, "pause")
        if which is not None:
            self._add(which, event)
        elif event.kind is EventKind.SIGNAL_RECEIVED:
            self._signals.append(event)
        elif event.kind is EventKind.CAUSES_CHANGED:
            if self._current is not None and EventKind.RESUMED not in self._current.events:
                self._current.add_causes(event)
        elif event.kind is EventKind.ALL_PARKED or _has_failed(event):
            self._of_all.append(event)

    def finish(self) -> tuple[Pause, ...]:
        """Return all pauses, by number."""
        while self._open:
            self._close(next(iter(self._open)))
        return tuple(sorted(self._done, key=lambda pause: pause.number))

    def _add(self, which: int, event: Event) -> None:
        draft = self._open.get(which)
        if draft is None:
            if which <= self._done_up_to:
                return  # of a finished pause: later than any thread can be
            draft = self._open[which] = _PauseBuilder(which)
        draft.add(event)
        if event.kind is EventKind.GATE_CLOSED:
            self._current, draft.signals = draft, tuple(self._signals)
            self._signals.clear()
        elif event.kind is EventKind.RESUMED:
            self._signals.clear()  # earlier ones belong to this resume, not to the next pause
        if len(self._open) > _OPEN:
            self._close(next(iter(self._open)))

    def _close(self, which: int) -> None:
        draft = self._open.pop(which)
        _add_by_time(self._of_all, draft)
        self._done.append(_pause(draft))
        self._done_up_to = max(self._done_up_to, which)


def _has_failed(event: Event) -> bool:
    """Whether the ranks did not reach one collective in time; they may later."""
    return event.kind is EventKind.AGREEMENT_FAILED and event.data.get("what") == "park"


def _add_by_time(events: Iterable[Event], draft: _PauseBuilder) -> None:
    """Give another thread's line to the pause that was in force, wherever it is."""
    closed, resumed = (
        stamp_of(draft.events.get(kind)) for kind in (EventKind.GATE_CLOSED, EventKind.RESUMED)
    )
    if closed is None:
        return
    for event in events:
        if closed <= event.mono_ns and (resumed is None or event.mono_ns <= resumed):
            draft.add(event)


def _pause(draft: _PauseBuilder) -> Pause:
    seen, missing = draft.events, _missing(draft)
    anyone = next(iter(seen.values()))
    held = seen.get(EventKind.FIRST_OPERATOR_HELD) or seen.get(EventKind.LATE_OPERATOR_HELD)
    parked, resumed = seen.get(EventKind.PARKED), seen.get(EventKind.RESUMED)
    closed, released = seen.get(EventKind.GATE_CLOSED), seen.get(EventKind.FIRST_OPERATOR_RELEASED)
    drained = seen.get(EventKind.DRAINED)
    vacated, restored = seen.get(EventKind.VACATED), seen.get(EventKind.RESTORED)
    all_parked, failed = seen.get(EventKind.ALL_PARKED), seen.get(EventKind.AGREEMENT_FAILED)
    requested_ns = first_integer((closed, parked), "requested_mono_ns")
    resume_requested_ns = first_integer((resumed, released), "requested_mono_ns")
    reported = released
    if draft.let_go is not None and restored is not None:
        # the vacate itself requested this opening, once all memory was back
        resume_requested_ns, reported = draft.let_go.mono_ns, None
    on = released if released is not None else (None if _waited(draft) else resumed)
    return Pause(
        at_s=None,
        rank=anyone.rank,
        number=draft.number,
        restart_count=anyone.restart_count,
        pid=anyone.pid,
        causes=_shared(tuple(draft.causes)),
        signal=_shared(_signal(draft, requested_ns)),
        step=step_of(anyone),
        requested_mono_ns=requested_ns,
        closed_mono_ns=stamp_of(closed),
        held_mono_ns=stamp_of(held),
        parked_mono_ns=stamp_of(parked),
        all_parked_mono_ns=stamp_of(all_parked),
        drained_mono_ns=stamp_of(drained),
        resume_requested_mono_ns=resume_requested_ns,
        resumed_mono_ns=stamp_of(resumed),
        released_mono_ns=stamp_of(released),
        park_us=_measured(parked, "park_us", requested_ns, stamp_of(parked)),
        all_parked_us=_measured(all_parked, "all_parked_us", requested_ns, stamp_of(all_parked)),
        in_flight=first_integer((all_parked, failed), "in_flight"),
        let_through=integer(data_of(all_parked), "let_through") or 0,
        drain_us=_measured(drained, "drain_us", stamp_of(parked), stamp_of(drained)),
        undrained_s=number(data_of(seen.get(EventKind.NOT_DRAINED)), "waited_s"),
        vacated_mono_ns=stamp_of(vacated),
        restored_mono_ns=stamp_of(restored),
        vacated_bytes=integer(data_of(vacated), "moved_bytes"),
        vacate_s=number(data_of(vacated), "vacate_s"),
        restore_s=number(data_of(restored), "restore_s"),
        not_vacated=_shared(text(data_of(seen.get(EventKind.NOT_VACATED)), "reason")),
        parked_s=_measured(resumed, "parked_s", stamp_of(parked), stamp_of(resumed))
        if parked
        else None,
        resume_us=_measured(reported, "resume_us", resume_requested_ns, stamp_of(on)),
        operator=_shared(text(data_of(held), "operator")),
        phase=_shared(text(data_of(held), "phase")),
        outcome=_outcome(missing, parked=parked is not None, resumed=resumed is not None),
        missing=missing,
    )


@functools.lru_cache(maxsize=10_000)
def _shared(value: Any) -> Any:
    """Share equal values: hardly any of a hundred thousand pauses has its own operator."""
    return value


def _outcome(missing: tuple[str, ...], *, parked: bool, resumed: bool) -> Outcome:
    if not missing:
        return "complete"
    if resumed and not parked:
        return "withdrawn"
    if not resumed:
        return "not resumed" if parked else "not parked"
    return "incomplete"


def _missing(draft: _PauseBuilder) -> tuple[str, ...]:
    wanted = [EventKind.GATE_CLOSED, EventKind.PARKED, EventKind.RESUMED]
    if _waited(draft):
        wanted.append(EventKind.FIRST_OPERATOR_RELEASED)
    return tuple(kind.value for kind in wanted if kind not in draft.events)


def _waited(draft: _PauseBuilder) -> bool:
    """Whether a thread was held, and has to be released."""
    seen = draft.events
    if EventKind.FIRST_OPERATOR_HELD in seen or EventKind.LATE_OPERATOR_HELD in seen:
        return True
    return (integer(data_of(seen.get(EventKind.PARKED)), "held") or 0) > 0


def _signal(draft: _PauseBuilder, requested_ns: int | None) -> str | None:
    """Return the signal with the request's stamp, else the last before the gate closed.

    Repeated signals of one kind make one line, with the last stamp, so stamps may differ.
    """
    if draft.causes == ["api"]:
        return None
    exact = [event for event in draft.signals if event.mono_ns == requested_ns]
    return next((text(data_of(event), "signal") for event in (*exact, *draft.signals[::-1])), None)


_UNIT_NS = {"us": 1e3, "s": 1e9}


def _measured(
    event: Event | None, key: str, begin_ns: int | None, end_ns: int | None
) -> float | None:
    """What the rank measured itself, else what the stamps give; the unit is the end of the key."""
    reported = None if event is None else number(event.data, key)
    if reported is not None:
        return reported
    return span(begin_ns, end_ns, _UNIT_NS[key.rpartition("_")[2]])
