"""Several ranks: one that is paused has all parked, before one collective, with none in flight."""

from __future__ import annotations

import os
import signal
import time

import pytest
from coordination.attempts import Attempt, Story
from kit.team import coordinator_of
from processes import wait_until

from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import RUN_AGAIN

WORLD = 3
LONG = {"epochs": 400}
"""Longer than any test."""


def begin_training(story: Story, world: int = WORLD, **options: object) -> Attempt:
    """A run whose ranks have all made steps."""
    attempt = story.begin(world, **{**LONG, **options})
    wait_until(lambda: all(story.steps(rank) for rank in range(world)), "the first steps")
    story.wait_for(EventKind.RANKS_JOINED, world=world)
    return attempt


def parked_together(story: Story, rank: int) -> int:
    """How often this rank was told that all are parked."""
    return len(story.events(rank, EventKind.ALL_PARKED))


def wait_for_parked(story: Story, number: int, world: int = WORLD) -> None:
    wait_until(
        lambda: all(parked_together(story, rank) >= number for rank in range(world)),
        f"pause {number} of all ranks",
    )


def kill_coordinator(attempt: Attempt) -> None:
    coordinator = coordinator_of(attempt.pids[0])
    assert coordinator is not None
    os.kill(coordinator, signal.SIGKILL)


def stop(story: Story, attempt: Attempt) -> None:
    """The end of a test: all are saved and gone."""
    attempt.signal(0)
    assert set(attempt.end().codes.values()) == {RUN_AGAIN}, attempt.said


@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_one_paused_rank_parks_all(model: str, story: Story) -> None:
    """SIGUSR1 to one rank, again and again, a different one each time: all park, with nothing in
    flight and at the same step or two steps beside one collective; SIGUSR2 to it lets all go on."""
    attempt = begin_training(story, model=model)
    for number in range(1, 7):
        rank = number % WORLD
        attempt.signal(rank, signal.SIGUSR1)
        wait_for_parked(story, number)
        before = [len(story.steps(one)) for one in range(WORLD)]
        assert max(before) - min(before) <= 1
        attempt.signal(rank, signal.SIGUSR2)
        wait_until(
            lambda before=before: all(
                len(story.steps(one)) > before[one] + 1 for one in range(WORLD)
            ),
            "all ranks to train on",
        )
    for rank in range(WORLD):
        told = story.events(rank, EventKind.ALL_PARKED)
        assert [event.data["in_flight"] for event in told] == [0] * 6
        assert not story.events(rank, EventKind.AGREEMENT_FAILED)
    stop(story, attempt)


def test_a_suspend_longer_than_the_time_out(story: Story) -> None:
    """As Slurm suspends: SIGTSTP to all, SIGSTOP, and SIGCONT after three times the collectives'
    time-out. Nobody dies of it, and no step is missing."""
    attempt = begin_training(story, timeout_s=2)
    for rank in range(WORLD):
        attempt.signal(rank, signal.SIGTSTP)
    wait_for_parked(story, 1)
    for rank in range(WORLD):
        attempt.signal(rank, signal.SIGSTOP)
    time.sleep(6)  # what is tested is the length of the suspend
    before = len(story.steps(0))
    for rank in range(WORLD):
        attempt.signal(rank, signal.SIGCONT)
    wait_until(lambda: len(story.steps(0)) > before + 5, "the run to go on")
    stop(story, attempt)
    for rank in range(WORLD):
        steps = [step for step, _, _ in story.steps(rank)]
        assert steps == list(range(len(steps)))


def test_a_stop_wins_over_a_pause(story: Story) -> None:
    """One rank is paused, another is told to stop: all are let go, save at one step and leave."""
    attempt = begin_training(story)
    attempt.signal(1, signal.SIGUSR1)
    wait_for_parked(story, 1)
    attempt.signal(2, signal.SIGTERM)
    assert set(attempt.end().codes.values()) == {RUN_AGAIN}, attempt.said
    assert len({record.end_step for record in story.attempts()}) == 1


def test_a_rank_that_dies_in_a_pause_holds_nobody(story: Story) -> None:
    """The paused rank is killed: the others are let go, and fail in their collective, as they would
    have without a pause."""
    attempt = begin_training(story)
    attempt.signal(1, signal.SIGUSR1)
    wait_for_parked(story, 1)
    attempt.signal(1, signal.SIGKILL)
    attempt.end()
    assert attempt.codes[1] == -signal.SIGKILL
    assert attempt.codes[0] == attempt.codes[2] == 1, attempt.said


def test_the_hub_is_killed(story: Story) -> None:
    """The ranks train on, meet at another coordinator, and pause and stop together as before; also
    when it is killed during a pause, which then begins anew."""
    attempt = begin_training(story)
    kill_coordinator(attempt)
    story.wait_for(EventKind.RANKS_JOINED, world=WORLD, times=2)
    attempt.signal(1, signal.SIGUSR1)
    wait_for_parked(story, 1)
    kill_coordinator(attempt)
    wait_for_parked(story, 2)
    before = len(story.steps(0))
    attempt.signal(1, signal.SIGUSR2)
    wait_until(lambda: len(story.steps(0)) > before + 3, "the run to train on")
    stop(story, attempt)
