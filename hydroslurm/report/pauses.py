"""The pauses of one process: each as a value, and how it is built from the lines of the log. Pure.

A pause whose lines are partly lost (the process was killed, the disk was full) is still a
:class:`Pause`: what is unknown is None, and :attr:`Pause.missing` names it. Timestamps are
CLOCK_MONOTONIC nanoseconds of the machine the process ran on.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

from hydroslurm.core.events import Event, EventKind
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

PEERS, VACATED = "peers", "vacated"

Outcome = Literal["complete", "withdrawn", "not resumed", "not parked", "incomplete"]


@dataclass(frozen=True, slots=True)
class Pause:
    """One pause of one rank, as far as its events tell.

    Attributes:
        rank: global rank.
        number: 1, 2, ... within one attempt.
        restart_count: how often the job had been requeued before this attempt.
        causes: why, in order of appearance: ``slurm``, ``user``, ``api``, ``terminal``; ``peers``:
            because another rank of the job was paused.
        signal: the signal that asked for it, None for a call of ``pause()``.
        step: training step when the gate closed, None if unknown.
        requested_mono_ns: the signal handler's stamp, or that of the call.
        closed_mono_ns: the gate was armed.
        held_mono_ns: the first operator was held; None when the rank was quiet.
        parked_mono_ns: no training thread issues anything any more, for the first time. A rank that
            is let through to a collective of its peers parks again.
        all_parked_mono_ns: every rank learned that all of them are parked, at the same
            collectives; None for a rank that is alone, and where that was not reached.
        drained_mono_ns: the devices have finished what was launched; None without devices.
        resume_requested_mono_ns: the stamp of the request that opened the gate; of a pause that
            vacated, of the one that has its memory given back first.
        resumed_mono_ns: the gate was opened.
        released_mono_ns: the first thread that was held runs again.
        park_us: from the request to parked.
        all_parked_us: from the request, at this rank, until all ranks were parked.
        in_flight: collectives that were in flight then; or when the ranks gave up coming together.
        let_through: collectives that this rank was let through on its way.
        drain_us: how long the devices took to finish what was launched.
        undrained_s: how long they were waited for in vain; None when they drained or there are
            none.
        vacated_mono_ns, restored_mono_ns: device memory was on the host, and back; None where it
            was not moved.
        vacated_bytes: how much.
        vacate_s, restore_s: how long that took, in the rank's own words.
        not_vacated: why a pause that was to vacate did not.
        parked_s: from parked to the opening of the gate.
        resume_us: from the request to the first thread that runs; when no thread was held, to the
            open gate.
        operator: the first operator that was held, such as ``aten::linear``.
        phase: ``forward`` or ``backward``: where that operator was met.
        missing: the events that this pause should have and that the log does not hold.
    """

    rank: int
    number: int
    restart_count: int = 0
    causes: tuple[str, ...] = ()
    signal: str | None = None
    step: int | None = None
    requested_mono_ns: int | None = None
    closed_mono_ns: int | None = None
    held_mono_ns: int | None = None
    parked_mono_ns: int | None = None
    all_parked_mono_ns: int | None = None
    drained_mono_ns: int | None = None
    resume_requested_mono_ns: int | None = None
    resumed_mono_ns: int | None = None
    released_mono_ns: int | None = None
    park_us: float | None = None
    all_parked_us: float | None = None
    in_flight: int | None = None
    let_through: int = 0
    drain_us: float | None = None
    undrained_s: float | None = None
    vacated_mono_ns: int | None = None
    restored_mono_ns: int | None = None
    vacated_bytes: int | None = None
    vacate_s: float | None = None
    restore_s: float | None = None
    not_vacated: str | None = None
    parked_s: float | None = None
    resume_us: float | None = None
    operator: str | None = None
    phase: str | None = None
    missing: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type[Pause], tuple[object, ...]]:
        """Pickled by the hundred thousand: what dataclass generates takes three times as long."""
        return Pause, _values_of(self)

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def main_cause(self) -> str | None:
        """Its first cause other than ``peers``, else ``peers``; None if its causes are lost."""
        for cause in self.causes:
            if cause != PEERS:
                return cause
        return self.causes[0] if self.causes else None

    @property
    def outcome(self) -> Outcome:
        """What became of it; a ``withdrawn`` pause was resumed before it had parked."""
        parked, resumed = self.parked_mono_ns is not None, self.resumed_mono_ns is not None
        if self.complete:
            return "complete"
        if resumed and not parked:
            return "withdrawn"
        if not resumed:
            return "not resumed" if parked else "not parked"
        return "incomplete"

    @property
    def begin_mono_ns(self) -> int | None:
        """The earliest known timestamp."""
        stamps = (self.requested_mono_ns, self.closed_mono_ns, self.held_mono_ns)
        later = (self.parked_mono_ns, self.resume_requested_mono_ns, self.resumed_mono_ns)
        return next((stamp for stamp in (*stamps, *later) if stamp is not None), None)


_values_of = attrgetter(*(one.name for one in fields(Pause)))


_OPEN = 16
"""So many pauses wait for lines that come late: of a thread that is released when the next pause
has begun, or of another thread."""

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
"""The kinds that a :class:`PausesBuilder` wants to see."""


@dataclass(slots=True)
class _PauseBuilder:
    """A pause while its lines are being collected: the first of each kind."""

    number: int
    events: dict[EventKind, Event] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    signals: tuple[Event, ...] = ()
    let_go: Event | None = None
    """Nothing but its own vacate holds the rank any more."""

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
    """Collects by number, not by order: a thread may be released after the next pause has begun."""

    def __init__(self) -> None:
        self._done: list[Pause] = []
        self._done_up_to = -1
        self._open: dict[int, _PauseBuilder] = {}
        self._current: _PauseBuilder | None = None
        self._signals: deque[Event] = deque(maxlen=_OPEN)
        self._of_all: deque[Event] = deque(maxlen=2 * _OPEN)

    def add(self, event: Event) -> None:
        """A line of one of the kinds in ``OF_PAUSES``."""
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
        """All of them, by number."""
        while self._open:
            self._close(next(iter(self._open)))
        return tuple(sorted(self._done, key=lambda pause: pause.number))

    def _add(self, which: int, event: Event) -> None:
        draft = self._open.get(which)
        if draft is None:
            if which <= self._done_up_to:
                return  # of a pause that is done: later than any thread may be
            draft = self._open[which] = _PauseBuilder(which)
        draft.add(event)
        if event.kind is EventKind.GATE_CLOSED:
            self._current, draft.signals = draft, tuple(self._signals)
            self._signals.clear()
        elif event.kind is EventKind.RESUMED:
            self._signals.clear()  # what came before asked for this resume, not for the next pause
        if len(self._open) > _OPEN:
            self._close(next(iter(self._open)))

    def _close(self, which: int) -> None:
        draft = self._open.pop(which)
        _add_by_time(self._of_all, draft)
        self._done.append(_pause(draft))
        self._done_up_to = max(self._done_up_to, which)


def _has_failed(event: Event) -> bool:
    """The ranks did not come to one collective in time; they may, later."""
    return event.kind is EventKind.AGREEMENT_FAILED and event.data.get("what") == "park"


def _add_by_time(events: Iterable[Event], draft: _PauseBuilder) -> None:
    """What another thread has written belongs to the pause that was in force, wherever its line
    is."""
    closed, resumed = (
        stamp_of(draft.events.get(kind)) for kind in (EventKind.GATE_CLOSED, EventKind.RESUMED)
    )
    if closed is None:
        return
    for event in events:
        if closed <= event.mono_ns and (resumed is None or event.mono_ns <= resumed):
            draft.add(event)


def _pause(draft: _PauseBuilder) -> Pause:
    seen = draft.events
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
        # the request that opened the gate was the vacate's own, once all was back
        resume_requested_ns, reported = draft.let_go.mono_ns, None
    on = released if released is not None else (None if _waited(draft) else resumed)
    return Pause(
        rank=anyone.rank,
        number=draft.number,
        restart_count=anyone.restart_count,
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
        missing=_missing(draft),
    )


@functools.lru_cache(maxsize=10_000)
def _shared(value: Any) -> Any:
    """One object for equal values: of a hundred thousand pauses hardly any are held at operators of
    their own."""
    return value


def _missing(draft: _PauseBuilder) -> tuple[str, ...]:
    wanted = [EventKind.GATE_CLOSED, EventKind.PARKED, EventKind.RESUMED]
    if _waited(draft):
        wanted.append(EventKind.FIRST_OPERATOR_RELEASED)
    return tuple(kind.value for kind in wanted if kind not in draft.events)


def _waited(draft: _PauseBuilder) -> bool:
    """True when a thread was held, so that there is one to be released."""
    seen = draft.events
    if EventKind.FIRST_OPERATOR_HELD in seen or EventKind.LATE_OPERATOR_HELD in seen:
        return True
    return (integer(data_of(seen.get(EventKind.PARKED)), "held") or 0) > 0


def _signal(draft: _PauseBuilder, requested_ns: int | None) -> str | None:
    """The signal with the stamp of the request, else the last before the gate closed.

    Several signals of one kind are reported as one, with the stamp of the last, so that the stamp
    may differ.
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
