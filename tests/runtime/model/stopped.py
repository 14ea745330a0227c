"""What a state of the model of stopping is made of, and its letters as the real book has them."""

from __future__ import annotations

from typing import Any, NamedTuple

from runtime.model.members import LIVING, Message, Rank


class State(NamedTuple):
    """All ranks, the number of the book's content, and the weather that may still come."""

    ranks: tuple[Rank, ...]
    book: int
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
    """A message as the book reads it."""
    do, *more = message
    if do == "want":
        return {"do": do, "kind": more[0]}
    if do == "promise":
        return {"do": do, "meeting": more[0], "place": more[1]}
    return {"do": do, "done": more[0]}


def read(letter: dict[str, Any]) -> Message | None:
    """A letter of the book, as far as meetings are concerned."""
    say = letter["say"]
    if say == "wanted":
        return ("wanted", letter["meeting"], letter["kind"])
    if say == "meet":
        return ("meet_at", letter["meeting"], letter["place"])
    if say == "meeting_failed":
        return ("fail", letter["meeting"], letter["finished"])
    return None
