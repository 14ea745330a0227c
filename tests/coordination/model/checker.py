"""Look at everything that can happen: an explicit-state model checker, breadth first.

A model says what its states are, what the program can do in one (``steps``) and what can happen to
it (``weather``: signals, deaths). The difference matters for waiting: a rank that only another
signal could wake waits for ever. So a state without steps has to be an acceptable end, whatever the
weather could still bring, and the steps alone must not lead round in a circle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

S = TypeVar("S")
Words = tuple[Any, ...]
"""What happens, in parts: they become a line only where somebody reads it."""


class Model(Protocol[S]):
    """What is looked at. States are hashable and equal when nothing that follows differs."""

    def starts(self) -> Iterable[S]:
        """Where it may begin."""

    def steps(self, state: S) -> Iterator[tuple[Words, S]]:
        """What the program can do: words, and the state that comes of it."""

    def weather(self, state: S) -> Iterator[tuple[Words, S]]:
        """What can happen to it, and need not."""

    def fault(self, state: S) -> str | None:
        """What must never be so, and is."""

    def end_fault(self, state: S) -> str | None:
        """What is wrong with this as an end; None: it may end here."""


@dataclass(frozen=True, kw_only=True)
class Counterexample:
    """The shortest way to something that must not be.

    Attributes:
        message: what is wrong.
        story: the steps that lead there, in order.
    """

    message: str
    story: tuple[str, ...]

    def __str__(self) -> str:
        return "\n  ".join((self.message, *self.story))


@dataclass(frozen=True, kw_only=True)
class Explored(Generic[S]):
    """All of a model, or what was seen until something was wrong.

    Attributes:
        ends: those in which nothing goes on by itself.
        counterexample: None when nothing is wrong.
    """

    ends: tuple[S, ...]
    counterexample: Counterexample | None


class TooManyStates(Exception):
    """The bounds of a model are too wide to look at all of it."""


def explore(model: Model[S], *, max_states: int = 1_000_000) -> Explored[S]:
    """Look at every state until one is wrong.

    Raises:
        TooManyStates: more than ``max_states`` can be reached.
    """
    # states are never garbage, and looking for some among them takes a third of the time
    gc.disable()
    try:
        return _explore(model, max_states)
    finally:
        gc.enable()


def _explore(model: Model[S], max_states: int) -> Explored[S]:
    seen: dict[S, int] = {}
    parents: list[tuple[int, Words]] = []
    states: list[S] = []
    edges: list[list[int]] = []
    ends: list[S] = []

    def meet(state: S, parent: int, words: Words) -> int:
        number = seen.setdefault(state, len(states))
        if number == len(states):
            states.append(state)
            parents.append((parent, words))
        return number

    def wrong(message: str, number: int) -> Explored[S]:
        story = _story(parents, number)
        example = Counterexample(message=message, story=story)
        return Explored(ends=tuple(ends), counterexample=example)

    for start in model.starts():
        meet(start, -1, ())
    at = 0
    while at < len(states):
        state = states[at]
        if message := model.fault(state):
            return wrong(message, at)
        edges.append([meet(after, at, words) for words, after in model.steps(state)])
        if not edges[at]:
            if message := model.end_fault(state):
                return wrong(message, at)
            ends.append(state)
        for words, after in model.weather(state):
            meet(after, at, words)
        if len(states) > max_states:
            raise TooManyStates(f"{len(states)} states, {at} looked at; wanted: {max_states}")
        at += 1
    circle = _circle(edges)
    if circle is not None:
        return wrong("goes round in a circle", circle)
    return Explored(ends=tuple(ends), counterexample=None)


def _story(parents: list[tuple[int, Words]], number: int) -> tuple[str, ...]:
    story = []
    while number >= 0:
        number, words = parents[number]
        story.append(" ".join(map(str, words)))
    return tuple(reversed(story[:-1]))


def _circle(edges: list[list[int]]) -> int | None:
    """A state from which steps lead back to it. Kahn's algorithm: what never loses its last
    predecessor is on a circle, or behind one."""
    before = [0] * len(edges)
    for targets in edges:
        for target in targets:
            before[target] += 1
    ready = [number for number, count in enumerate(before) if count == 0]
    done = 0
    while ready:
        done += 1
        for target in edges[ready.pop()]:
            before[target] -= 1
            if before[target] == 0:
                ready.append(target)
    if done == len(edges):
        return None
    return next(number for number, count in enumerate(before) if count)
