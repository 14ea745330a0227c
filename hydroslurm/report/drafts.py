"""One life's pauses, collected line by line with few lines kept. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hydroslurm.core.events import EventKind
from hydroslurm.core.files import clean
from hydroslurm.report.fields import (
    data_of,
    first_integer,
    integer,
    number,
    stamp_of,
    step_of,
    text,
)
from hydroslurm.report.lines import Line
from hydroslurm.report.pauses import Pause

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
        EventKind.RESUMED,
        EventKind.FIRST_OPERATOR_RELEASED,
    }
)
"""The kinds that a :class:`Pauses` wants to see."""


@dataclass(slots=True)
class _Draft:
    """A pause while its lines are being collected: the first of each kind."""

    number: int
    lines: dict[EventKind, Line] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    signals: tuple[Line, ...] = ()

    def add(self, line: Line) -> None:
        kind = line.kind
        if kind not in self.lines:
            self.lines[kind] = line
        if kind is not EventKind.RESUMED and "causes" in line.data:
            self.add_causes(line)

    def add_causes(self, line: Line) -> None:
        causes = line.data.get("causes")
        if isinstance(causes, list):
            for cause in causes[:_MOST_CAUSES]:
                if isinstance(cause, str) and clean(cause) not in self.causes:
                    self.causes.append(clean(cause))
            del self.causes[_MOST_CAUSES:]


class Pauses:
    """Collects by number, not by order: a thread may be released after the next pause has begun."""

    def __init__(self) -> None:
        self._done: list[Pause] = []
        self._done_up_to = -1
        self._open: dict[int, _Draft] = {}
        self._current: _Draft | None = None
        self._signals: deque[Line] = deque(maxlen=_OPEN)
        self._of_all: deque[Line] = deque(maxlen=2 * _OPEN)

    def add(self, line: Line) -> None:
        """A line of one of the kinds in ``OF_PAUSES``."""
        which = integer(line.data, "pause")
        if which is not None:
            self._add(which, line)
        elif line.kind is EventKind.SIGNAL_RECEIVED:
            self._signals.append(line)
        elif line.kind is EventKind.CAUSES_CHANGED:
            if self._current is not None and EventKind.RESUMED not in self._current.lines:
                self._current.add_causes(line)
        elif line.kind is EventKind.ALL_PARKED or _has_failed(line):
            self._of_all.append(line)

    def finish(self) -> tuple[Pause, ...]:
        """All of them, by number."""
        while self._open:
            self._close(next(iter(self._open)))
        return tuple(sorted(self._done, key=lambda pause: pause.number))

    def _add(self, which: int, line: Line) -> None:
        draft = self._open.get(which)
        if draft is None:
            if which <= self._done_up_to:
                return  # of a pause that is done: later than any thread may be
            draft = self._open[which] = _Draft(which)
        draft.add(line)
        if line.kind is EventKind.GATE_CLOSED:
            self._current, draft.signals = draft, tuple(self._signals)
            self._signals.clear()
        elif line.kind is EventKind.RESUMED:
            self._signals.clear()  # what came before asked for this resume, not for the next pause
        if len(self._open) > _OPEN:
            self._close(next(iter(self._open)))

    def _close(self, which: int) -> None:
        draft = self._open.pop(which)
        _add_by_time(self._of_all, draft)
        self._done.append(_pause(draft))
        self._done_up_to = max(self._done_up_to, which)


def _has_failed(line: Line) -> bool:
    """The ranks did not come to one collective in time; they may, later."""
    return line.kind is EventKind.AGREEMENT_FAILED and line.data.get("what") == "park"


def _add_by_time(lines: Iterable[Line], draft: _Draft) -> None:
    """What another thread has written belongs to the pause that was in force, wherever its line
    is."""
    closed, resumed = (
        stamp_of(draft.lines.get(kind)) for kind in (EventKind.GATE_CLOSED, EventKind.RESUMED)
    )
    if closed is None:
        return
    for line in lines:
        if closed <= line.mono_ns and (resumed is None or line.mono_ns <= resumed):
            draft.add(line)


def _pause(draft: _Draft) -> Pause:
    seen = draft.lines
    anyone = next(iter(seen.values()))
    held = seen.get(EventKind.FIRST_OPERATOR_HELD) or seen.get(EventKind.LATE_OPERATOR_HELD)
    parked, resumed = seen.get(EventKind.PARKED), seen.get(EventKind.RESUMED)
    closed, released = seen.get(EventKind.GATE_CLOSED), seen.get(EventKind.FIRST_OPERATOR_RELEASED)
    drained = seen.get(EventKind.DRAINED)
    all_parked, failed = seen.get(EventKind.ALL_PARKED), seen.get(EventKind.AGREEMENT_FAILED)
    requested_ns = first_integer((closed, parked), "requested_mono_ns")
    resume_requested_ns = first_integer((resumed, released), "requested_mono_ns")
    on = released if released is not None else (None if _waited(draft) else resumed)
    return Pause(
        rank=anyone.who.rank,
        number=draft.number,
        restart_count=anyone.who.restart_count,
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
        parked_s=_measured(resumed, "parked_s", stamp_of(parked), stamp_of(resumed))
        if parked
        else None,
        resume_us=_measured(released, "resume_us", resume_requested_ns, stamp_of(on)),
        operator=_shared(text(data_of(held), "operator")),
        phase=_shared(text(data_of(held), "phase")),
        missing=_missing(draft),
    )


_Value = TypeVar("_Value")
_seen: dict[object, Any] = {}
_MOST_SEEN = 10_000


def _shared(value: _Value) -> _Value:
    """One object for equal values: of a hundred thousand pauses hardly any are held at operators of
    their own."""
    if len(_seen) > _MOST_SEEN:
        _seen.clear()
    shared: _Value = _seen.setdefault(value, value)
    return shared


def _missing(draft: _Draft) -> tuple[str, ...]:
    wanted = [EventKind.GATE_CLOSED, EventKind.PARKED, EventKind.RESUMED]
    if _waited(draft):
        wanted.append(EventKind.FIRST_OPERATOR_RELEASED)
    return tuple(kind.value for kind in wanted if kind not in draft.lines)


def _waited(draft: _Draft) -> bool:
    """True when a thread was held, so that there is one to be released."""
    seen = draft.lines
    if EventKind.FIRST_OPERATOR_HELD in seen or EventKind.LATE_OPERATOR_HELD in seen:
        return True
    return (integer(data_of(seen.get(EventKind.PARKED)), "held") or 0) > 0


def _signal(draft: _Draft, requested_ns: int | None) -> str | None:
    """The signal with the stamp of the request, else the last before the gate closed.

    Several signals of one kind are reported as one, with the stamp of the last, so that the stamp
    may differ.
    """
    if draft.causes == ["api"]:
        return None
    exact = [line for line in draft.signals if line.mono_ns == requested_ns]
    return next((text(data_of(line), "signal") for line in (*exact, *draft.signals[::-1])), None)


_UNIT_NS = {"us": 1e3, "s": 1e9}


def _measured(
    line: Line | None, key: str, begin_ns: int | None, end_ns: int | None
) -> float | None:
    """What the rank measured itself, else what the stamps give; the unit is the end of the key.

    None also when the stamps run backwards: such lines are damaged, and a negative latency is worse
    than none.
    """
    reported = None if line is None else number(line.data, key)
    if reported is not None or begin_ns is None or end_ns is None or end_ns < begin_ns:
        return reported
    return (end_ns - begin_ns) / _UNIT_NS[key.rpartition("_")[2]]
