"""One rank of a model, with the real meetings in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hydroslurm.coordination.stop_barrier import Meetings, StopBarrier
from hydroslurm.errors import AgreementFailed

RANKS = 3
LIVING = ("training", "in collective", "arriving", "raising", "waiting", "saving")
Message = tuple[Any, ...]
Words = tuple[Any, ...]
Called = tuple[tuple[Any, ...], ...]


class Rank(NamedTuple):
    """One rank.

    Attributes:
        entered, saves: collectives and joint saves that it has come to.
        calling: a meeting that is on the list already, with no promise yet.
        called: the list, as rows of what a Meeting is.
        stops: it has to, when it has saved.
    """

    phase: str = "training"
    place: int = 0
    entered: int = 0
    saves: int = 0
    joined: bool = True
    signals: int = 0
    calling: Message = ()
    called: Called = ()
    stops: bool = False
    up: tuple[Message, ...] = ()
    down: tuple[Message, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What the ranks do; each default is right, and each other value is a mistake to be found."""

    meetings: Callable[[], Meetings] = Meetings
    reads_place_early: bool = False
    looks_before_raising: bool = False
    waits: bool = True
    heeds_own_signal_alone: bool = False
    raises_place_after_saving: bool = False


class RealMeetings:
    """What the real code makes of the meetings of a rank, worked out once.

    A Meetings is no value, so that a rank has its content: the place, and rows of what is called.
    """

    def __init__(self, make: Callable[[], Meetings]) -> None:
        self._make = make
        self._known: dict[Any, Any] = {}

    def do(self, rank: Rank, what: str, *arguments: Any) -> Any:
        """Change a rank, or tell something of it."""
        key = (rank.place, rank.called, what, *arguments)
        if key not in self._known:
            self._known[key] = self._work_out(rank.place, rank.called, what, *arguments)
        result = self._known[key]
        return rank._replace(called=result) if what in _CHANGES else result

    def _work_out(self, place: int, called: Called, what: str, *arguments: Any) -> Any:
        meetings = self._make()
        meetings.place = place
        meetings._called = [_meeting(row) for row in called]
        if what == "call":
            number, kind, *early = arguments
            meetings.place = early[0] if early else place
            meetings.call(number, kind, of_rank=0, words="")
        elif what == "meet":
            try:
                held = [(one.kind, one.place) for one in meetings._meet()]
            except AgreementFailed:
                return None, None
            return _rows(meetings), tuple(held)
        elif what == "has_to_wait":
            return any(meetings._waits_for(one) for one in meetings._called)
        elif what == "meet_at":
            meetings.decide(*arguments)
        else:
            number, finished = arguments
            meetings.fail(number, missing=(0,), finished=finished)
        return _rows(meetings)


_CHANGES = ("call", "meet_at", "fail")


def _meeting(row: tuple[Any, ...]) -> StopBarrier:
    number, kind, promise, place, failed, off = row
    failure = AgreementFailed("gone", missing=(0,)) if failed else None
    return StopBarrier(number, kind, 0, promise, place=place, failure=failure, off=off)


def _rows(meetings: Meetings) -> Called:
    return tuple(
        (one.number, one.kind, one.promise, one.place, one.failure is not None, one.off)
        for one in meetings._called
    )


def begin(rank: Rank) -> Rank:
    """Come to a collective."""
    return rank._replace(phase="in collective", entered=rank.entered + 1)


def leave(rank: Rank, phase: str) -> Rank:
    """The end of a rank, which hears no more. One that breaks does not say goodbye."""
    word = ("gone",) if phase == "broken" else ("bye", phase in ("finished", "stopped"))
    after = rank._replace(phase=phase, signals=0, calling=(), called=(), stops=False, down=())
    return send(after, word)


def send(rank: Rank, message: Message) -> Rank:
    """Put a message on its way to the hub."""
    return rank._replace(up=(*rank.up, message))
