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


def wait_for_parked(story: Story, number: int) -> None:
    """Until all ranks were told so often that all are parked."""
    wait_until(
        lambda: all(len(story.events(n, EventKind.ALL_PARKED)) >= number for n in range(WORLD)),
        f"pause {number} of all ranks",
    )


def stop(attempt: Attempt) -> None:
    """One rank is told: all save and leave."""
    attempt.signal(0)
    assert set(attempt.end().codes.values()) == {RUN_AGAIN}, attempt.said


@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_one_paused_rank_parks_all(model: str, story: Story) -> None:
    """SIGUSR1 to one rank, again and again, a different one each time: all park, with nothing in
    flight and at the same step or two steps beside one collective; SIGUSR2 to it lets all go on. A
    stop wins over the last pause: all save at one step and leave."""
    attempt = story.begin_training(WORLD, model=model)
    for number in range(1, 6):
        rank = number % WORLD
        attempt.signal(rank, signal.SIGUSR1)
        wait_for_parked(story, number)
        before = [len(story.steps(one)) for one in range(WORLD)]
        assert max(before) - min(before) <= 1
        if number < 5:
            attempt.signal(rank, signal.SIGUSR2)
            for one in range(WORLD):
                story.wait_for_more(2, rank=one)
    stop(attempt)
    assert len({record.end_step for record in story.attempts()}) == 1
    for rank in range(WORLD):
        told = story.events(rank, EventKind.ALL_PARKED)
        assert [event.data["in_flight"] for event in told] == [0] * 5
        assert not story.events(rank, EventKind.AGREEMENT_FAILED)


def test_a_suspend_longer_than_the_time_out(story: Story) -> None:
    """As Slurm suspends: SIGTSTP to all, SIGSTOP, and SIGCONT after more than the collectives'
    time-out. Nobody dies of it, and no step is missing."""
    attempt = story.begin_training(WORLD, timeout_s=2)
    for rank in range(WORLD):
        attempt.signal(rank, signal.SIGTSTP)
    wait_for_parked(story, 1)
    for rank in range(WORLD):
        attempt.signal(rank, signal.SIGSTOP)
    time.sleep(3)  # what is tested is the length of the suspend
    for rank in range(WORLD):
        attempt.signal(rank, signal.SIGCONT)
    story.wait_for_more(6)
    stop(attempt)
    for rank in range(WORLD):
        steps = [step for step, _, _ in story.steps(rank)]
        assert steps == list(range(len(steps)))


def test_a_rank_that_dies_in_a_pause_holds_nobody(story: Story) -> None:
    """The paused rank is killed: the others are let go, and fail in their collective, as they would
    have without a pause."""
    attempt = story.begin_training(WORLD)
    attempt.signal(1, signal.SIGUSR1)
    wait_for_parked(story, 1)
    attempt.signal(1, signal.SIGKILL)
    attempt.end()
    assert attempt.codes == {0: 1, 1: -signal.SIGKILL, 2: 1}, attempt.said


def test_the_hub_is_killed(story: Story) -> None:
    """The ranks train on, meet at another coordinator, and pause and stop together as before; also
    when it is killed during a pause, which then begins anew."""
    attempt = story.begin_training(WORLD)
    kill_coordinator(attempt)
    story.wait_for(EventKind.RANKS_JOINED, world=WORLD, times=2)
    attempt.signal(1, signal.SIGUSR1)
    wait_for_parked(story, 1)
    kill_coordinator(attempt)
    wait_for_parked(story, 2)
    attempt.signal(1, signal.SIGUSR2)
    story.wait_for_more(4)
    stop(attempt)


def kill_coordinator(attempt: Attempt) -> None:
    coordinator = coordinator_of(attempt.pids[0])
    assert coordinator is not None
    os.kill(coordinator, signal.SIGKILL)
