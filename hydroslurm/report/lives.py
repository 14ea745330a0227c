"""The events of any number of ranks, read as lives and their pauses. Pure.

A *life* is one process of one rank. A run folder keeps one file per rank over all requeues, so one
file holds several lives, and around a requeue the old process may still write while the new one
does. What tells them apart is the restart count, the host and the pid, never the place in the
file. A process that installs twice has two lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hydroslurm.events import Event, EventKind
from hydroslurm.report.fields import (
    data_of,
    first_integer,
    integer,
    number,
    stamp_of,
    step_of,
    text,
)
from hydroslurm.report.pauses import Life, Pause, StopRequest
from hydroslurm.report.progress import progress_of


def lives_of(events: Iterable[Event]) -> tuple[Life, ...]:
    """The lives in the events of any number of ranks, in order of rank and then of appearance.

    Within one file that is the order of time, also when the date was set between two lives.
    """
    lives = [_life(group) for group in _by_process(events)]
    return tuple(sorted(lives, key=lambda life: life.rank))


def _by_process(events: Iterable[Event]) -> list[list[Event]]:
    groups: list[list[Event]] = []
    newest: dict[tuple[int, int, str, int], list[Event]] = {}
    for event in events:
        who = (event.rank, event.restart_count, event.host, event.pid)
        # a life whose first line is lost starts with whatever line comes first
        if who not in newest or event.kind is EventKind.INSTALLED:
            newest[who] = []
            groups.append(newest[who])
        newest[who].append(event)
    return groups


def _life(events: Sequence[Event]) -> Life:
    first = events[0]
    offsets = sorted(event.epoch_ns - event.mono_ns for event in events)
    stamps = [event.mono_ns for event in events]
    return Life(
        rank=first.rank,
        restart_count=first.restart_count,
        pid=first.pid,
        host=first.host,
        job_id=first.job_id,
        first_mono_ns=min(stamps),
        last_mono_ns=max(stamps),
        clock_offset_ns=offsets[(len(offsets) - 1) // 2],
        ended=events[-1].kind is EventKind.UNINSTALLED,
        pauses=_pauses(events),
        stops=tuple(_stop(event) for event in events if event.kind is EventKind.STOP_REQUESTED),
        progress=progress_of(events),
        world_size=max((integer(data_of(event), "world_size") or 1 for event in events), default=1),
    )


def _stop(event: Event) -> StopRequest:
    requested = integer(data_of(event), "requested_mono_ns")
    return StopRequest(
        rank=event.rank,
        requested_mono_ns=event.mono_ns if requested is None else requested,
        signal=text(data_of(event), "signal"),
        restart_count=event.restart_count,
    )


@dataclass
class _Draft:
    """A pause while its events are being collected: the first event of each kind."""

    number: int
    events: dict[EventKind, Event] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    signals: tuple[Event, ...] = ()

    def add(self, event: Event) -> None:
        self.events.setdefault(event.kind, event)
        if event.kind is not EventKind.RESUMED:
            self.add_causes(event)

    def add_causes(self, event: Event) -> None:
        causes = data_of(event).get("causes")
        if isinstance(causes, list):
            new = [cause for cause in causes if isinstance(cause, str) and cause not in self.causes]
            self.causes.extend(new)


def _pauses(events: Sequence[Event]) -> tuple[Pause, ...]:
    """Collect by number, not by order: a thread may be released after the next pause has begun."""
    drafts: dict[int, _Draft] = {}
    signals: list[Event] = []
    current: _Draft | None = None
    for event in events:
        number = integer(data_of(event), "pause")
        if event.kind is EventKind.SIGNAL_RECEIVED:
            signals.append(event)
        elif event.kind is EventKind.CAUSES_CHANGED:
            if current is not None and EventKind.RESUMED not in current.events:
                current.add_causes(event)
        elif number is not None:
            draft = drafts.setdefault(number, _Draft(number))
            draft.add(event)
            if event.kind is EventKind.GATE_CLOSED:
                current, draft.signals, signals = draft, tuple(signals), []
            elif event.kind is EventKind.RESUMED:
                signals = []  # what came before asked for this resume, not for the next pause
    for event in events:
        if event.kind is EventKind.ALL_PARKED or _has_failed(event):
            _add_by_time(event, drafts.values())
    return tuple(_pause(drafts[number]) for number in sorted(drafts))


def _has_failed(event: Event) -> bool:
    """The ranks did not come to one collective in time; they may, later."""
    return event.kind is EventKind.AGREEMENT_FAILED and data_of(event).get("what") == "park"


def _add_by_time(event: Event, drafts: Iterable[_Draft]) -> None:
    """What another thread has written belongs to the pause that was in force, wherever its line
    is."""
    for draft in drafts:
        closed, resumed = (
            stamp_of(draft.events.get(kind)) for kind in (EventKind.GATE_CLOSED, EventKind.RESUMED)
        )
        begun = closed is not None and closed <= event.mono_ns
        if begun and (resumed is None or event.mono_ns <= resumed):
            draft.add(event)


def _pause(draft: _Draft) -> Pause:
    seen = draft.events
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
        rank=anyone.rank,
        number=draft.number,
        restart_count=anyone.restart_count,
        causes=tuple(draft.causes),
        signal=_signal(draft, requested_ns),
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
        operator=text(data_of(held), "operator"),
        phase=text(data_of(held), "phase"),
        missing=_missing(draft),
    )


def _missing(draft: _Draft) -> tuple[str, ...]:
    wanted = [EventKind.GATE_CLOSED, EventKind.PARKED, EventKind.RESUMED]
    if _waited(draft):
        wanted.append(EventKind.FIRST_OPERATOR_RELEASED)
    return tuple(kind.value for kind in wanted if kind not in draft.events)


def _waited(draft: _Draft) -> bool:
    """True when a thread was held, so that there is one to be released."""
    seen = draft.events
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
    exact = [event for event in draft.signals if event.mono_ns == requested_ns]
    return next((text(data_of(event), "signal") for event in (*exact, *draft.signals[::-1])), None)


_UNIT_NS = {"us": 1e3, "s": 1e9}


def _measured(
    event: Event | None, key: str, begin_ns: int | None, end_ns: int | None
) -> float | None:
    """What the rank measured itself, else what the stamps give; the unit is the end of the key.

    None also when the stamps run backwards: such lines are damaged, and a negative latency is worse
    than none.
    """
    reported = number(data_of(event), key)
    if reported is not None or begin_ns is None or end_ns is None or end_ns < begin_ns:
        return reported
    return (end_ns - begin_ns) / _UNIT_NS[key.rpartition("_")[2]]
