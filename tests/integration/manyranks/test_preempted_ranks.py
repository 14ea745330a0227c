"""The promise, for several ranks on a real Slurm: a training of four ranks that is suspended,
preempted and requeued ends with the bits of one that nobody stops."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from integration.manyranks.acts import PREEMPTIONS, SUSPENDED_S, Story
from training.trainings import steps_lost

from hydroslurm.core.events import EventKind

pytestmark = pytest.mark.slurm


def test_ddp_ends_with_the_same_bits(ddp_alone: dict[str, Any], ddp_story: Story) -> None:
    """Two preemptions and two suspends: weights, optimizer, and on every rank the loss and the
    samples of each step are those of the run that nobody stops; no step is lost or trained
    twice."""
    _ends_like(ddp_story, ddp_alone, attempts=PREEMPTIONS + 1, suspends=PREEMPTIONS)


def test_fsdp_ends_with_the_same_bits(fsdp_alone: dict[str, Any], fsdp_story: Story) -> None:
    """The same of FSDP2, requeued once after a suspend of ten times the time-out of its
    collectives: all ranks were parked, and went on in the same processes."""
    _ends_like(fsdp_story, fsdp_alone, attempts=2, suspends=1)
    training = fsdp_story.training
    for rank in range(4):
        (resumed,) = training.events_of(rank, EventKind.RESUMED)
        assert resumed.data["parked_s"] >= SUSPENDED_S
        assert not training.events_of(rank, EventKind.AGREEMENT_FAILED)


def test_below_agents_it_ends_with_the_same_bits(
    ddp_alone: dict[str, Any], agent_story: Story
) -> None:
    """Two agents with two ranks each, of which Slurm signals the agents only where it has cgroups:
    suspended past SIGSTOP or by the freezer and resumed in the same processes, requeued, and equal
    to the run that had no agents."""
    _ends_like(agent_story, ddp_alone, attempts=2, suspends=1)
    for rank in range(4):
        pids = {event.pid for event in agent_story.training.events_of(rank, attempt=1)}
        assert len(pids) == 1


def _ends_like(story: Story, alone: dict[str, Any], *, attempts: int, suspends: int) -> None:
    training = story.training
    made = training.attempts()
    endings = Counter(attempt.ending for attempt in made)
    assert len(made) == attempts, training.log()
    assert endings["finished"] == 1
    assert endings["error"] == endings[None] == 0
    assert steps_lost(made) == 0, made
    result = training.result
    assert result["steps_trained_twice"] == 0
    assert all(result["every_sample_once"])
    assert result == alone
    for rank in range(4):
        parked = training.events_of(rank, EventKind.ALL_PARKED)
        assert [event.data["in_flight"] for event in parked] == [0] * suspends
        assert len(training.events_of(rank, EventKind.RESUMED)) == suspends
