"""A training of four ranks below `hydroslurm agent` on two nodes of a real Slurm."""

from __future__ import annotations

from typing import Any

import pytest
from integration.manyranks.acts import Story
from training.trainings import steps_lost

from hydroslurm.core.events import EventKind

pytestmark = pytest.mark.slurm


def test_below_agents_it_ends_with_the_same_bits(
    ddp_alone: dict[str, Any], agent_story: Story
) -> None:
    """Two agents with two ranks each: suspended past SIGSTOP and resumed in the same processes,
    requeued, and equal to the run that was left alone, which had no agents."""
    training = agent_story.training
    attempts = training.attempts()
    assert len(attempts) == 2, training.log()
    assert attempts[-1].ending == "finished"
    assert steps_lost(attempts) == 0, attempts
    assert training.result == ddp_alone
    for rank in range(4):
        (parked,) = training.events_of(rank, EventKind.ALL_PARKED)
        assert parked.data["in_flight"] == 0
        pids = {event.pid for event in training.events_of(rank, attempt=1)}
        assert len(pids) == 1
