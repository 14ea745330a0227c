"""What a state of the model of parking is made of, and its outbox as the real coordinator has
them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

from hydroslurm.coordination.messages import runs_of
from hydroslurm.coordination.state import CoordinatorState

Message = tuple[Any, ...]

ROUND = 1

Groups = Mapping[str, tuple[int, ...]]
Programs = tuple[tuple[str, ...], ...]

GROUPS = {"w": (0, 1, 2), "a": (0, 1), "b": (1, 2), "c": (0, 2)}
"""All, and three that cross; in a program a capital message is an asynchronous collective."""
FOUR = {"w": (0, 1, 2, 3), "r": (0, 1), "s": (2, 3), "x": (0, 2), "y": (1, 3)}
"""Rows and columns."""


def programs_of(story: str, groups: Groups, *, ranks: int) -> Programs:
    """Each rank's part in collectives that are held one after the other. Programs that hang by
    themselves are not among them, and all others are."""
    return tuple(
        tuple(key for key in story if rank in groups[key.lower()]) for rank in range(ranks)
    )


def stories(length: int) -> list[str]:
    """Sequences of groups of three ranks, one of those that differ by the ranks' names only."""
    names = ["abc", "acb", "bac", "bca", "cab", "cba"]
    chosen = {}
    for keys in product("wabc", repeat=length):
        story = "".join(keys)
        alike = min(story.translate(str.maketrans("abc", other)) for other in names)
        chosen.setdefault(alike, alike)
    return list(chosen)


class Rank(NamedTuple):
    """One rank.

    Attributes:
        issued: collectives that are counted; the next one is at this index of its program.
        passing: through the gate with the next one, which is not counted yet.
        own, peers: why the gate is closed.
        allowance: collectives that it is let through in spite of that.
        due: the pause, of a report that is wanted; 0: none is.
        owing: it could move when it last reported, and has not moved since.
        reported: what it had issued when it last reported in this pause; -1: it has not.
    """

    issued: int = 0
    passing: bool = False
    own: bool = False
    peers: bool = False
    allowance: int = 0
    due: int = 0
    owing: bool = False
    reported: int = -1
    dead: bool = False
    up: tuple[Message, ...] = ()
    down: tuple[Message, ...] = ()


class State(NamedTuple):
    """All ranks, the number of the coordinator's content, and the weather that may still come."""

    ranks: tuple[Rank, ...]
    coordinator: int
    pauses: int
    resumes: int
    deaths: int
    told: bool = False


def put(state: State, number: int, rank: Rank, **more: int) -> State:
    """The state with one rank changed."""
    ranks = (*state.ranks[:number], rank, *state.ranks[number + 1 :])
    return state._replace(ranks=ranks, **more) if more else State(ranks, *state[1:])


def send(state: State, number: int, *message: Any) -> State:
    """Put a message of a rank on its way to the coordinator."""
    rank = state.ranks[number]
    return put(state, number, rank._replace(up=(*rank.up, message)))


def tidy(coordinator: CoordinatorState) -> None:
    """Take out the number of the round, and how many of them brought nothing new.

    A round begins when all have reported in the one before, so that no rank is ever in another; and
    rounds that lead nowhere are seen as a circle.
    """
    pause = coordinator._pause
    pause._round = ROUND if pause._round else 0
    pause._stalled_rounds, pause._last_counts, pause._behind = 0, {}, {}
    if not pause._active:
        pause._equal_rounds, pause._counts, pause._all_parked = 0, {}, False
        pause._groups = {}


def write(message: Message) -> dict[str, Any]:
    """A message as the coordinator reads it."""
    do, *more = message
    if do == "members":
        return {"type": do, "groups": {key: runs_of(ranks) for key, ranks in more[0]}}
    if do != "counts":
        return {"type": do}
    pause, groups, allowance = more
    return {
        "type": do,
        "pause": pause,
        "round": ROUND,
        "groups": None if groups is None else dict(groups),
        "in_flight": 0,
        "allowance": allowance,
    }


def read(message: dict[str, Any]) -> Message | None:
    """A message of the coordinator, as far as pauses are concerned."""
    if message["type"] == "describe":
        return (message["type"], 0, tuple(message["groups"]))
    if message["type"] in ("hold", "count", "let_through", "all_parked", "release"):
        return (message["type"], message["pause"], message.get("n", 0))
    return None
