"""What a state of the model of stopping is made of, with the real barriers in each rank, and
messages as the real coordinator has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hydroslurm.coordination.stop_barrier import StopBarrier, StopBarriers
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
        calling: a barrier that is on the list already, with no proposal yet.
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

    barriers: Callable[[], StopBarriers] = StopBarriers
    reads_index_early: bool = False
    looks_before_counting: bool = False
    waits: bool = True
    heeds_own_signal_alone: bool = False
    counts_after_saving: bool = False


class RealBarriers:
    """What the real code makes of the barriers of a rank, worked out once.

    StopBarriers are not values, so a rank has their content: the index, and rows of what is called.
    """

    def __init__(self, make: Callable[[], StopBarriers]) -> None:
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
        barriers = self._make()
        barriers.safe_point_index = place
        barriers._called = [_barrier(row) for row in called]
        if what == "call":
            number, kind, *early = arguments
            barriers.safe_point_index = early[0] if early else place
            barriers.call(number, kind, of_rank=0, message="")
        elif what == "barrier_agreed":
            try:
                held = [(one.kind, one.safe_point_index) for one in barriers._hold_due()]
            except AgreementFailed:
                return None, None
            return _rows(barriers), tuple(held)
        elif what == "has_to_wait":
            return any(barriers._waits_for(one) for one in barriers._called)
        elif what == "meet_at":
            barriers.decide(*arguments)
        else:
            number, finished = arguments
            barriers.fail(number, missing=(0,), finished=finished)
        return _rows(barriers)


_CHANGES = ("call", "meet_at", "fail")


def _barrier(row: tuple[Any, ...]) -> StopBarrier:
    number, kind, proposal, place, failed, off = row
    failure = AgreementFailed("gone", missing=(0,)) if failed else None
    return StopBarrier(
        number, kind, 0, proposal, safe_point_index=place, failure=failure, is_cancelled=off
    )


def _rows(barriers: StopBarriers) -> Called:
    return tuple(
        (
            one.number,
            one.kind,
            one.proposal,
            one.safe_point_index,
            one.failure is not None,
            one.is_cancelled,
        )
        for one in barriers._called
    )


def begin(rank: Rank) -> Rank:
    """Come to a collective."""
    return rank._replace(phase="in collective", entered=rank.entered + 1)


def leave(rank: Rank, phase: str) -> Rank:
    """The end of a rank, which hears no more. One that breaks does not say goodbye."""
    word = ("gone",) if phase == "broken" else ("leave", phase in ("finished", "stopped"))
    after = rank._replace(phase=phase, signals=0, calling=(), called=(), stops=False, down=())
    return send(after, word)


def send(rank: Rank, message: Message) -> Rank:
    """Put a message on its way to the coordinator."""
    return rank._replace(up=(*rank.up, message))


class State(NamedTuple):
    """All ranks, the number of the coordinator's content, and the weather that may still come."""

    ranks: tuple[Rank, ...]
    coordinator: int
    signals: int
    deaths: int
    saves: int
    anybody_died: bool = False


def is_missed(others: list[tuple[str, int]], count: int) -> bool:
    """Whether somebody will never come to it."""
    return any(phase not in LIVING and theirs < count for phase, theirs in others)


def put(state: State, number: int, rank: Rank) -> State:
    """The state with one rank changed."""
    return State((*state.ranks[:number], rank, *state.ranks[number + 1 :]), *state[1:])


def write(message: Message) -> dict[str, Any]:
    """A message as the coordinator reads it."""
    do, *more = message
    if do == "call_barrier":
        return {"type": do, "kind": more[0]}
    if do == "propose":
        return {"type": do, "barrier": more[0], "safe_point_index": more[1]}
    return {"type": do, "done": more[0]}


def read(message: dict[str, Any]) -> Message | None:
    """A message of the coordinator, as far as barriers are concerned."""
    say = message["type"]
    if say == "barrier_called":
        return ("barrier_called", message["barrier"], message["kind"])
    if say == "barrier_agreed":
        return ("meet_at", message["barrier"], message["safe_point_index"])
    if say == "barrier_failed":
        return ("fail", message["barrier"], message["finished"])
    return None
