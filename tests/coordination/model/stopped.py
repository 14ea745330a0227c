"""What a state of the model of stopping is made of, and its outbox as the real coordinator has
them."""

from __future__ import annotations

from typing import Any, NamedTuple

from coordination.model.members import LIVING, Message, Rank


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
