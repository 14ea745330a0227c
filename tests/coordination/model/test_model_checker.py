"""The checker itself finds what it is there for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from coordination.model.checker import Explored, TooManyStates, Words, explore


class Graph:
    """A model that is written down: state -> what may follow; ``~`` before a state is weather."""

    def __init__(self, edges: dict[str, str], *, ends: str = "", wrong: str = "") -> None:
        self.edges, self.ends, self.wrong = edges, ends, wrong

    def starts(self) -> Iterator[str]:
        yield "a"

    def steps(self, state: str) -> Iterator[tuple[Words, str]]:
        for after in self.edges.get(state, "").split():
            if not after.startswith("~"):
                yield ("to", after), after

    def weather(self, state: str) -> Iterator[tuple[Words, str]]:
        for after in self.edges.get(state, "").split():
            if after.startswith("~"):
                yield ("blown to", after[1:]), after[1:]

    def fault(self, state: str) -> str | None:
        return f"{state} is wrong" if state in self.wrong else None

    def end_fault(self, state: str) -> str | None:
        return None if state in self.ends else f"stuck in {state}"


def look(edges: dict[str, str], *, ends: str = "", wrong: str = "") -> Explored[str]:
    return explore(Graph(edges, ends=ends, wrong=wrong))


def test_everything_is_looked_at() -> None:
    """Without a fault all states and ends are told."""
    explored = look({"a": "b c", "b": "d", "c": "d ~e", "e": "d"}, ends="d")
    assert explored.counterexample is None
    assert sorted(explored.states) == list("abcde")
    assert explored.ends == ("d",)


def test_the_shortest_story_is_told() -> None:
    """A counterexample is the shortest way to what is wrong."""
    example = look({"a": "b c", "b": "c", "c": "d"}, wrong="d").counterexample
    assert example is not None
    assert (example.message, example.story) == ("d is wrong", ("to c", "to d"))
    assert str(example) == "d is wrong\n  to c\n  to d"


def test_weather_wakes_nobody() -> None:
    """A state that only weather leads out of is stuck."""
    example = look({"a": "b", "b": "~c"}, ends="c").counterexample
    assert example is not None
    assert example.message == "stuck in b"


def test_a_circle_is_found() -> None:
    """Steps that lead back are found; weather may do so."""
    example = look({"a": "b", "b": "c", "c": "b d"}, ends="d").counterexample
    assert example is not None
    assert example.message == "goes round in a circle"
    assert look({"a": "b", "b": "c", "c": "~b"}, ends="c").counterexample is None


def test_too_wide_bounds_are_told() -> None:
    """A model with more states than wanted raises, for it was not looked at as a whole."""
    with pytest.raises(TooManyStates, match="wanted: 2"):
        explore(Graph({"a": "b", "b": "c", "c": "d"}, ends="d"), max_states=2)
