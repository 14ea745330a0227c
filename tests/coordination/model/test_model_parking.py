"""Pauses of several ranks with no collective in flight: every interleaving of small programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
from coordination.model.checker import Counterexample, explore
from coordination.model.coordinators import Coordinators
from coordination.model.parked import (
    FOUR,
    GROUPS,
    Groups,
    State,
    programs_of,
    read,
    stories,
    tidy,
    write,
)
from coordination.model.parking import Parking

from hydroslurm.coordination.pause_state import PauseState
from hydroslurm.coordination.state import CoordinatorState

TWO = {"w": (0, 1)}


def look(
    story: str,
    *,
    ranks: int = 3,
    groups: Groups = GROUPS,
    make: Callable[[int], CoordinatorState] = CoordinatorState,
    **bounds: Any,
) -> tuple[Counterexample | None, list[State]]:
    """What can go wrong in these collectives, and the ends."""
    coordinators = Coordinators(lambda: make(ranks), write=write, read=read, tidy=tidy)
    programs = programs_of(story, groups, ranks=ranks)
    explored = explore(
        Parking(coordinators=coordinators, programs=programs, groups=groups, **bounds)
    )
    return explored.counterexample, list(explored.ends)


@pytest.mark.parametrize("story", [*stories(2), "www", "wab", "abw", "awb", "abc"])
def test_all_are_parked_with_nothing_in_flight(story: str) -> None:
    """Two and three collectives of three ranks, on groups that cross: a pause at any moment comes
    about, behind the same collectives on all ranks, and at each of them."""
    wrong, ends = look(story)
    assert wrong is None, str(wrong)
    assert all(end.told for end in ends)
    done = {sum(rank.issued for rank in end.ranks) for end in ends}
    lengths = [len(program) for program in programs_of(story, GROUPS, ranks=3)]
    assert {0, sum(lengths)} <= done


@pytest.mark.parametrize("story", ["Aw", "aB", "AbC"])
def test_collectives_that_nobody_waits_for(story: str) -> None:
    """An asynchronous collective lets a rank run ahead of the others, who are let through."""
    wrong, ends = look(story)
    assert wrong is None, str(wrong)
    assert all(end.told for end in ends)


def test_rows_and_columns() -> None:
    """Four ranks, each in a row and a column."""
    wrong, ends = look("rsx", ranks=4, groups=FOUR)
    assert wrong is None, str(wrong)
    assert all(end.told for end in ends)


@pytest.mark.parametrize(
    ("story", "pauses", "resumes"), [("Ww", 1, 1), ("w", 2, 1)], ids=["one rank", "both ranks"]
)
def test_resumes_at_any_moment(story: str, pauses: int, resumes: int) -> None:
    """Whenever a rank is resumed all ranks go on and end, or are held for another's signal."""
    wrong, ends = look(story, ranks=2, groups=TWO, pauses=pauses, resumes=resumes)
    assert wrong is None, str(wrong)
    assert any(all(rank.issued == len(story) for rank in end.ranks) for end in ends)
    for end in ends:
        assert end.told == any(rank.own for rank in end.ranks)


@pytest.mark.parametrize("story", ["a", "b"])
def test_deaths(story: str) -> None:
    """With a rank that dies at any moment the others are parked, or released when the pause was the
    dead one's."""
    wrong, ends = look(story, deaths=1)
    assert wrong is None, str(wrong)
    assert {end.told for end in ends} == {True, False}


# --- mistakes, each of which has to be found
# ------------------------------------------------------------------------------------------------


class BelievesOneRound(PauseState):
    """Takes the first equal numbers for the truth."""

    def _evaluate(self, present: Collection[int]) -> Any:
        self._equal_rounds = 1
        return super()._evaluate(present)


class OverlooksAllowances(PauseState):
    """Takes equal numbers for the truth although a rank may still go on."""

    def _evaluate(self, present: Collection[int]) -> Any:
        for rank in present & self._counts.keys():
            self._counts[rank] = {**self._counts[rank], "allowance": 0}
        return super()._evaluate(present)


class SeesOneGroup(PauseState):
    """Lets through for the first group of a rank only."""

    def _evaluate(self, present: Collection[int]) -> Any:
        for rank in present & self._counts.keys():
            self._groups[rank] = dict(list(self._groups[rank].items())[:1])
        return super()._evaluate(present)


class KeepsTheFirstReport(PauseState):
    """Does not take what a rank reports anew."""

    def counts(self, rank: int, message: Mapping[str, Any], present: Collection[int]) -> Any:
        groups = self._groups.get(rank, message["groups"])
        return super().counts(rank, {**message, "groups": groups}, present)


class LetsNobodyThrough(PauseState):
    """Asks again and again."""

    def _message(self, say: str = "count", **more: Any) -> dict[str, Any]:
        return super()._message("count" if say == "let_through" else say, **{**more, "n": 0})


class ParksAtOnce(PauseState):
    """Does not ask for numbers that are equal."""

    def _evaluate(self, present: Collection[int]) -> Any:
        return self._announce(present, in_flight=0) if self._counts else []


class WaitsForTheDead(PauseState):
    """Does not ask another rank who is in a group when the one that was asked is gone."""

    def without(self, rank: int, present: Collection[int]) -> Any:
        asked = dict(self._asked)
        outbox = super().without(rank, present)
        if asked:
            self._asked = asked
            return [(to, message) for to, message in outbox if message["type"] != "describe"]
        return outbox


def coordinator_with(pause: type[PauseState]) -> Callable[[int], CoordinatorState]:
    def make(ranks: int) -> CoordinatorState:
        coordinator = CoordinatorState(ranks)
        coordinator._pause = pause()
        return coordinator

    return make


@pytest.mark.parametrize(
    ("pause", "story", "words"),
    [
        (BelievesOneRound, "w", "all parked"),
        (OverlooksAllowances, "ww", "all parked"),
        (SeesOneGroup, "wa", "all parked"),
        (KeepsTheFirstReport, "wa", "all parked"),
        (LetsNobodyThrough, "w", "circle"),
        (ParksAtOnce, "w", "all parked"),
    ],
)
def test_mistakes_of_the_hub_are_found(pause: type[PauseState], story: str, words: str) -> None:
    """A coordinator with one mistake has a counterexample."""
    wrong, _ = look(story, make=coordinator_with(pause))
    assert wrong is not None
    assert words in wrong.message, str(wrong)


def test_a_rank_that_is_waited_for_in_vain_is_found() -> None:
    """A coordinator that waits for the members of a group from a rank that is dead."""
    wrong, _ = look("a", deaths=1, make=coordinator_with(WaitsForTheDead))
    assert wrong is not None
    assert "never comes about" in wrong.message, str(wrong)


@pytest.mark.parametrize("bounds", [{"takes_back": False}, {"moves_in_time": False}])
def test_mistakes_of_the_ranks_are_found(bounds: dict[str, Any]) -> None:
    """An allowance has to be taken back, and a thread that is not counted yet must not be overtaken
    by two rounds."""
    wrong, _ = look("ww", **bounds)
    assert wrong is not None
