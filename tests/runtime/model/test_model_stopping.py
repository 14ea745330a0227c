"""Stops and saves of several ranks at one place: every interleaving of small runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from runtime.model.books import Books
from runtime.model.checker import Counterexample, explore
from runtime.model.members import Habits, Rank
from runtime.model.stopped import State, read, write
from runtime.model.stopping import Stopping

from hydroslurm.coordination.state import CoordinatorState
from hydroslurm.coordination.stop_barrier import Meetings

HERE, LATE = True, False
TWO = (HERE, HERE)
EACH = (True, True)
"""A collective before each of two places."""
BY_ACCESS = {"by_access": True, "joined": TWO}


def look(
    *,
    make: Callable[[int], CoordinatorState] = CoordinatorState,
    joined: tuple[bool, ...] = (HERE,) * 3,
    **bounds: Any,
) -> tuple[Counterexample | None, list[State]]:
    """What can go wrong, and the ends."""
    books = Books(lambda: make(len(joined)), write=write, read=read)
    bounds.setdefault("collectives", EACH)
    explored = explore(Stopping(books=books, joined=joined, **bounds))
    return explored.counterexample, list(explored.ends)


def phases(ends: list[State]) -> set[str]:
    return {"+".join(sorted({rank.phase for rank in end.ranks})) for end in ends}


def stops(ends: list[State]) -> set[int]:
    return {one.place for end in ends for one in end.ranks if one.phase == "stopped"}


def test_all_stop_at_one_place_or_all_finish() -> None:
    """With two signals at any moments and ranks, all ranks end alike, and each place can be it."""
    wrong, ends = look(signals=2, collectives=(True, False, True))
    assert wrong is None, str(wrong)
    assert phases(ends) == {"stopped", "finished"}
    assert stops(ends) == {1, 2, 3}


@pytest.mark.parametrize(
    "bounds", [{}, {"collectives": (False, False), "joined": TWO}], ids=["together", "apart"]
)
def test_what_is_done_without_a_lock(bounds: dict[str, Any]) -> None:
    """A meeting that is called while the training thread arrives, access by access, is never
    missed."""
    wrong, ends = look(signals=1, by_access=True, **bounds)
    assert wrong is None, str(wrong)
    assert phases(ends) == {"stopped", "finished"}


def test_deaths() -> None:
    """With ranks that die at any moment nobody waits for ever, and the living are of one mind: a
    place that was decided stands, and otherwise all are told of the same failure."""
    wrong, ends = look(signals=1, deaths=2)
    assert wrong is None, str(wrong)
    assert {"dead+stopped", "dead+failed", "broken+dead", "dead+finished"} <= phases(ends)


@pytest.mark.parametrize(
    "bounds",
    [
        {"joined": (LATE, HERE, HERE), "deaths": 1, "collectives": (True,)},
        {"joined": (LATE, LATE, HERE)},
    ],
    ids=["one, and a death", "two"],
)
def test_signals_before_a_rank_has_joined(bounds: dict[str, Any]) -> None:
    """A rank that joins late, or has finished before it could, keeps nobody waiting."""
    wrong, ends = look(signals=1, alike=False, **bounds)
    assert wrong is None, str(wrong)
    assert {"stopped", "finished"} <= phases(ends)


@pytest.mark.parametrize(
    "bounds",
    [
        {"saves": 2, "joined": TWO},
        {"saves": 1, "joined": TWO, "collectives": (True, False, True)},
        {"saves": 1, "joined": TWO, "deaths": 1, "collectives": (True,)},
        {"saves": 1, "both_at_once": True, "collectives": (True,)},
    ],
    ids=["two saves", "apart", "a death", "three ranks"],
)
def test_a_save_and_a_stop_together(bounds: dict[str, Any]) -> None:
    """Periodic saves and a stop that are wanted at any moments hinder each other in no order."""
    wrong, ends = look(signals=1, alike=False, **bounds)
    assert wrong is None, str(wrong)
    saved_then_stopped = [
        end for end in ends if all(one.phase == "stopped" and one.saves for one in end.ranks)
    ]
    assert saved_then_stopped


def test_saves_alone() -> None:
    """A periodic save is held by all ranks at one place, and all go on to the end."""
    wrong, ends = look(saves=1)
    assert wrong is None, str(wrong)
    assert {tuple(one.saves for one in end.ranks) for end in ends} == {(0,) * 3, (1,) * 3}
    assert phases(ends) == {"finished"}


# --- mistakes, each of which has to be found
# ------------------------------------------------------------------------------------------------


class PromisesThisPlace(Meetings):
    """Promises the place that it is at."""

    def call(self, number: int, kind: str, *, of_rank: int, words: str) -> int:
        super().call(number, kind, of_rank=of_rank, words=words)
        self._called[-1].promise = self.place
        return self.place


class MeetsAtTheSmallest(CoordinatorState):
    """Takes the smallest promise for the common place."""

    def _judge(self, number: int) -> Any:
        promises = self._meetings[number]["promises"]
        if len(promises) == self.world_size:
            promises.update(dict.fromkeys(promises, min(promises.values())))
        return super()._judge(number)


class DecidesByRankZero(CoordinatorState):
    """Takes the promise of rank 0 for everybody's."""

    def _judge(self, number: int) -> Any:
        promises = self._meetings[number]["promises"]
        if 0 in promises:
            promises.update(dict.fromkeys(range(self.world_size), promises[0]))
        return super()._judge(number)


class ForgetsTheDead(CoordinatorState):
    """Waits for the promise of a rank that is gone."""

    def gone(self, rank: int, *, died: bool = True) -> Any:
        meetings, self._meetings = self._meetings, {}
        letters = super().gone(rank, died=died)
        self._meetings = meetings
        return letters


class CallsTheAbsent(CoordinatorState):
    """Does not wait with a call until everybody has joined."""

    def join(self, rank: int, who: Any) -> Any:
        real, self.world_size = self.world_size, 0
        letters = super().join(rank, who)
        self.world_size = real
        return letters

    def _call(self, rank: int, message: Any) -> Any:
        absent = {other: None for other in range(self.world_size) if other not in self._pids}
        self._pids.update(absent)
        letters = super()._call(rank, message)
        for other in absent:
            del self._pids[other]
        return letters


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"habits": Habits(meetings=PromisesThisPlace)}, "passed the common place"),
        ({"habits": Habits(reads_place_early=True), **BY_ACCESS}, "left its peers"),
        ({"habits": Habits(looks_before_raising=True), **BY_ACCESS}, "left its peers"),
        ({"habits": Habits(waits=False)}, "left its peers"),
        ({"habits": Habits(heeds_own_signal_alone=True)}, "left its peers"),
        ({"habits": Habits(raises_place_after_saving=True), "saves": 1, "joined": TWO}, "passed"),
        ({"make": MeetsAtTheSmallest}, "left its peers"),
        ({"make": DecidesByRankZero}, "left its peers"),
        ({"make": ForgetsTheDead, "deaths": 1}, "waits for ever"),
        ({"make": CallsTheAbsent, "joined": (LATE, HERE, HERE)}, "waits for ever"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(next(iter(value.values())))[-40:],
)
def test_mistakes_are_found(bounds: dict[str, Any], words: str) -> None:
    """A protocol with one mistake in it has a counterexample."""
    wrong, _ = look(signals=1, **bounds)
    assert wrong is not None
    assert words in wrong.words, str(wrong)


def test_states_are_values() -> None:
    """Two states that say the same are one state."""
    assert State((Rank(),), 0, 1, 0, 0) == State((Rank(place=0),), 0, 1, 0, 0)
