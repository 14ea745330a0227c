"""Ranks that are not all in the same situation when something is wanted of them.

Each scene is a hand-made fault round: besides what is asserted here nothing may hang, no commit may
be lost, and in the end the run has the bits of one that was left alone.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from typing import Any

import pytest
from faults.plans import Fault, Plan
from faults.rounds import Player
from faults.verdicts import AttemptSeen

from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import RUN_AGAIN

WORLD = 3
THINK_S = 0.03
"""A step takes so long: the run is not over before ranks have heard of what is wanted."""
LONG_S = 60.0
"""Of a pause that is ended at a moment, and not after a while."""
Play = Callable[..., AttemptSeen]


@pytest.fixture
def play(player: Player) -> Play:
    """Plays a run whose first attempt has these faults; that attempt."""

    def play_it(*faults: Fault, **options: Any) -> AttemptSeen:
        options = {"keep": 100, "think_s": THINK_S, **options}
        plan = Plan(0, next(_numbers), WORLD, "ddp", options, (faults,))
        outcome = player.play(plan)
        assert not outcome.complaints, f"{outcome.complaints}\n{outcome.said}"
        attempt = outcome.attempts[0]
        assert attempt.fired == faults or set(attempt.fired) == set(faults), outcome.said
        return attempt

    return play_it


_numbers = itertools.count()


def stopped_together(attempt: AttemptSeen) -> int:
    """All have left to run again; the one step that they stopped at."""
    assert set(attempt.codes.values()) == {RUN_AGAIN}, attempt.said
    places = [
        event.step for rank in range(WORLD) for event in attempt.of(rank, EventKind.SAFE_POINT)
    ]
    assert len(places) == WORLD
    assert len(set(places)) == 1
    assert attempt.newest == attempt.end_step
    return attempt.newest


def parked_with_none_in_flight(attempt: AttemptSeen) -> None:
    for rank in range(WORLD):
        parked = attempt.of(rank, EventKind.ALL_PARKED)
        assert [event.data["in_flight"] for event in parked] == [0], attempt.said


def paused_and_stopped(attempt: AttemptSeen) -> None:
    parked_with_none_in_flight(attempt)
    stopped_together(attempt)


def stopped_at_the_beginning(attempt: AttemptSeen) -> None:
    assert stopped_together(attempt) <= 1


PAUSE_AND_RESUME = (Fault(1, "step", 3, "pause", LONG_S), Fault(1, "event all_parked", 1, "resume"))
STOP_LATER = Fault(2, "step", 9, "term")
Check = Callable[[AttemptSeen], object]
SCENES: dict[str, tuple[tuple[Fault, ...], dict[str, Any], Check]] = {
    "SIGTERM to all processes, workers of loaders too: those live on until their rank leaves": (
        *((Fault(0, "step", 3, "stop_all"),), {"workers": 2}, stopped_together),
    ),
    "a rank is paused while workers bring batches": (
        *((*PAUSE_AND_RESUME, STOP_LATER), {"workers": 2}, paused_and_stopped),
    ),
    "suspended as Slurm does it, workers too": (
        *((Fault(1, "step", 3, "suspend", 0.8), STOP_LATER), {"workers": 2}, stopped_together),
    ),
    "a rank that sleeps counts as parked, and what it wants to do then is held": (
        (
            Fault(1, "step", 3, "delay", 1.0),
            Fault(0, "step", 3, "pause", LONG_S),
            Fault(0, "event all_parked", 1, "resume"),
            STOP_LATER,
        ),
        *({}, paused_and_stopped),
    ),
    "a stop while ranks choose what to load": (
        *((Fault(2, "agree resume", 1, "term"),), {}, stopped_at_the_beginning),
    ),
    "a stop before the first step": (
        (
            Fault(0, "event attempt_began", 1, "term"),
            Fault(1, "event attempt_began", 1, "delay", 0.5),
        ),
        *({}, stopped_at_the_beginning),
    ),
    # each step is followed by four collectives, with a check after each
    **{
        f"a stop at check {check} of an evaluation": (
            *((Fault(check % WORLD, "check", check, "term"),), {"checks": 4}, stopped_together),
        )
        for check in range(9, 13)
    },
    "Slurm preempts a suspended job: SIGCONT, and SIGTERM to all right behind it": (
        (Fault(1, "step", 3, "suspend", 0.6), Fault(1, "event resumed", 1, "stop_all")),
        *({}, stopped_together),
    ),
}
LONG = ("a stop at check 10 of an evaluation", "a stop at check 11 of an evaluation")


@pytest.mark.parametrize(
    "scene",
    [pytest.param(one, marks=[pytest.mark.long] if one in LONG else []) for one in SCENES],
)
def test_all_pause_and_stop_together(scene: str, play: Play) -> None:
    """What is done to one rank, or at a place of its own, is done by all, at one step."""
    faults, options, check = SCENES[scene]
    check(play(*faults, **options))


def test_a_stop_waits_for_the_rank_that_sleeps(play: Play) -> None:
    """One rank sleeps between two steps when another is told to stop: the others wait for it, and
    all stop at one step; the stop is known to it while it sleeps."""
    sleep = Fault(1, "step", 3, "delay", 2.0)
    attempt = play(sleep, Fault(0, "step", 3, "term"))
    stopped_together(attempt)
    (asked,) = attempt.of(1, EventKind.STOP_REQUESTED)
    (obeyed,) = attempt.of(1, EventKind.SAFE_POINT)
    assert obeyed.mono_ns - asked.mono_ns > sleep.seconds / 2 * 1e9


@pytest.mark.parametrize("told", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_stop_before_all_ranks_have_come(told: int, play: Play) -> None:
    """One rank is told to stop while another is still on its way: they leave to run again, without
    having trained."""
    attempt = play(Fault(1, "group", 1, "delay", 6.0), Fault(told, "claimed", 1, "term"))
    assert set(attempt.codes.values()) == {RUN_AGAIN}, attempt.said
    assert attempt.newest == 0


def test_a_stop_during_a_checkpoint(play: Play) -> None:
    """A rank still writes its part of a periodic save when another is told to stop: the save is
    finished, that of the stop follows."""
    attempt = play(
        Fault(1, "agree save/written", 1, "delay", 0.6),
        Fault(0, "event save_staged", 1, "term"),
        every_steps=2,
    )
    assert stopped_together(attempt) >= 2
    assert attempt.whole[0] == 2


def test_a_pause_during_a_save(play: Play) -> None:
    """A rank is paused with its part on the disk and nothing committed: the commit is made while
    all are parked."""
    attempt = play(
        Fault(1, "agree save/written", 1, "pause", LONG_S),
        Fault(2, "agree save/written", 1, "delay", 0.4),
        Fault(1, "event save_committed", 1, "resume"),
        Fault(0, "step", 9, "term"),
        every_steps=2,
    )
    stopped_together(attempt)
    kinds = [event.kind for event in attempt.events[1]]
    assert kinds.index(EventKind.SAVE_COMMITTED) < kinds.index(EventKind.RESUMED)


def test_a_second_stop_during_the_first(play: Play) -> None:
    """More signals while the save of a stop is written: one stop, with its status."""
    attempt = play(
        Fault(0, "step", 3, "term"),
        Fault(1, "event safe_point", 1, "term_twice"),
        Fault(2, "agree save/written", 1, "urg"),
        Fault(0, "agree run/exit", 1, "stop_all"),
    )
    stopped_together(attempt)
    assert len(attempt.whole) == 1


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_before_the_ranks_agree(victim: int, play: Play) -> None:
    """A rank dies at the place where all stop, before it has said that it is there: the others save
    nothing, leave to run again, and the last checkpoint counts."""
    attempt = play(
        Fault(0, "step", 5, "await_commit"),
        Fault(1, "step", 5, "term"),
        Fault(victim, "agree run/stop", 1, "kill"),
        every_steps=2,
    )
    assert attempt.codes[victim] == -signal.SIGKILL
    assert {code for rank, code in attempt.codes.items() if rank != victim} == {RUN_AGAIN}, (
        attempt.said
    )
    assert f"rank {victim} is gone" in attempt.said or f"gone: rank {victim}" in attempt.said
    assert attempt.newest >= 2


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_with_all_parts_on_the_disk(victim: int, play: Play) -> None:
    """A rank dies when all have written their parts for a stop, and nothing is committed: a
    survivor commits, and no step is lost."""
    attempt = play(
        Fault(1, "step", 5, "term"),
        Fault(victim, "agreed save/written", 1, "kill"),
    )
    assert attempt.codes[victim] == -signal.SIGKILL
    assert {code for rank, code in attempt.codes.items() if rank != victim} == {RUN_AGAIN}, (
        attempt.said
    )
    assert {event.step for event in attempt.of(1, EventKind.SAFE_POINT)} == {attempt.newest}


@pytest.mark.parametrize("moment", ["agree run/stop", "agreed run/stop", "agreed run/plan"])
def test_the_hub_dies_during_a_stop(moment: str, play: Play) -> None:
    """What connects the ranks is killed while they stop: all leave, in time, to run again."""
    attempt = play(Fault(1, "step", 5, "term"), Fault(0, moment, 1, "kill_coordinator"))
    assert set(attempt.codes.values()) == {RUN_AGAIN}, attempt.said


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_the_hub_dies_during_a_save(rank: int, play: Play) -> None:
    """What connects the ranks is killed when some have heard that all parts of a periodic save are
    written, and others have not: that save is over for all, and the next ones are made."""
    attempt = play(
        Fault(rank, "agree save/written", 1, "delay", 0.4),
        Fault(0, "event save_staged", 1, "kill_coordinator"),
        Fault(1, "step", 16, "await_commit"),
        Fault(1, "step", 17, "term"),
        every_steps=2,
    )
    assert stopped_together(attempt) > 10
    assert len(attempt.whole) > 1


def test_an_exception_while_another_is_told_to_stop(play: Play) -> None:
    """A rank raises where another is told to stop: it ends with its error, the others leave at the
    place to which it will not come, or fail in their collective, and the last checkpoint counts."""
    attempt = play(
        Fault(0, "step", 5, "await_commit"),
        Fault(1, "step", 6, "error"),
        Fault(0, "step", 6, "term"),
        every_steps=2,
    )
    assert attempt.codes[1] == 1
    assert {attempt.codes[0], attempt.codes[2]} <= {1, RUN_AGAIN}, attempt.said
    assert attempt.newest >= 2
