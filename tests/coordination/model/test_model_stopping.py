"""Stops and saves of several ranks at one safe point: every interleaving of small runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from coordination.model.checker import Counterexample, explore
from coordination.model.coordinators import Coordinators
from coordination.model.members import Habits, State, read, write
from coordination.model.stopping import Stopping

from hydroslurm.coordination.state import CoordinatorState
from hydroslurm.coordination.stop_barrier import StopBarriers

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
    coordinators = Coordinators(lambda: make(len(joined)), write=write, read=read)
    bounds.setdefault("collectives", EACH)
    explored = explore(Stopping(coordinators=coordinators, joined=joined, **bounds))
    return explored.counterexample, list(explored.ends)


def phases(ends: list[State]) -> set[str]:
    return {"+".join(sorted({rank.phase for rank in end.ranks})) for end in ends}


def stops(ends: list[State]) -> set[int]:
    return {one.place for end in ends for one in end.ranks if one.phase == "stopped"}


def test_all_stop_at_one_place_or_all_finish() -> None:
    """With two signals at any moments and ranks, all ranks end alike, and each safe point can be
    it."""
    wrong, ends = look(signals=2, collectives=(True, False, True))
    assert wrong is None, str(wrong)
    assert phases(ends) == {"stopped", "finished"}
    assert stops(ends) == {1, 2, 3}


@pytest.mark.parametrize(
    "bounds", [{}, {"collectives": (False, False), "joined": TWO}], ids=["together", "apart"]
)
def test_what_is_done_without_a_lock(bounds: dict[str, Any]) -> None:
    """A barrier that is called while the training thread arrives, access by access, is never
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
    """A periodic save is held by all ranks at one safe point, and all go on to the end."""
    wrong, ends = look(saves=1)
    assert wrong is None, str(wrong)
    assert {tuple(one.saves for one in end.ranks) for end in ends} == {(0,) * 3, (1,) * 3}
    assert phases(ends) == {"finished"}


# --- mistakes, each of which has to be found
# ------------------------------------------------------------------------------------------------


class ProposesThisSafePoint(StopBarriers):
    """Proposes the safe point that it is at."""

    def call(self, number: int, kind: str, *, of_rank: int, message: str) -> int:
        super().call(number, kind, of_rank=of_rank, message=message)
        self._called[-1].proposal = self.safe_point_index
        return self.safe_point_index


class TakesTheSmallest(CoordinatorState):
    """Takes the smallest proposal for the common safe point."""

    def _evaluate_barrier(self, number: int) -> Any:
        proposals = self._barriers[number]["proposals"]
        if len(proposals) == self.world_size:
            proposals.update(dict.fromkeys(proposals, min(proposals.values())))
        return super()._evaluate_barrier(number)


class DecidesByRankZero(CoordinatorState):
    """Takes the proposal of rank 0 for everybody's."""

    def _evaluate_barrier(self, number: int) -> Any:
        proposals = self._barriers[number]["proposals"]
        if 0 in proposals:
            proposals.update(dict.fromkeys(range(self.world_size), proposals[0]))
        return super()._evaluate_barrier(number)


class ForgetsTheDead(CoordinatorState):
    """Waits for the proposal of a rank that is gone."""

    def gone(self, rank: int, *, died: bool = True) -> Any:
        barriers, self._barriers = self._barriers, {}
        outbox = super().gone(rank, died=died)
        self._barriers = barriers
        return outbox


class CallsTheAbsent(CoordinatorState):
    """Does not wait with a call until everybody has joined."""

    def join(self, rank: int, cut_off: Any) -> Any:
        real, self.world_size = self.world_size, 0
        outbox = super().join(rank, cut_off)
        self.world_size = real
        return outbox

    def _call_barrier(self, rank: int, message: Any) -> Any:
        real, self._joined = self._joined, self.world_size
        outbox = super()._call_barrier(rank, message)
        self._joined = real
        return outbox


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"habits": Habits(barriers=ProposesThisSafePoint)}, "passed the common safe point"),
        ({"habits": Habits(reads_index_early=True), **BY_ACCESS}, "left its peers"),
        ({"habits": Habits(looks_before_counting=True), **BY_ACCESS}, "left its peers"),
        ({"habits": Habits(waits=False)}, "left its peers"),
        ({"habits": Habits(heeds_own_signal_alone=True)}, "left its peers"),
        ({"habits": Habits(counts_after_saving=True), "saves": 1, "joined": TWO}, "passed"),
        ({"make": TakesTheSmallest}, "left its peers"),
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
    assert words in wrong.message, str(wrong)


def test_nothing_is_called_behind_a_stop() -> None:
    """A second signal, or a save whose time has come, on a rank that has not left yet."""
    state = CoordinatorState(2)
    for rank in (0, 1):
        state.join(rank, ())

    def call(rank: int, kind: str) -> Any:
        return state.handle(rank, {"type": "call_barrier", "kind": kind, "message": ""})

    ((_, called), _) = call(0, "stop")
    for rank in (0, 1):
        told = {"type": "propose", "barrier": called["barrier"], "safe_point_index": 5}
        agreed = state.handle(rank, told)
    assert agreed[0][1]["type"] == "barrier_agreed"
    assert call(1, "stop") == call(0, "save") == []
