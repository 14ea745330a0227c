"""A training that comes back with another number of nodes, on a real Slurm."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from integration.manyranks.acts import WORLDS, Story
from training.trainings import steps_lost

from hydroslurm.core.events import EventKind

pytestmark = pytest.mark.slurm

TOLERANCE = 1e-5
"""Between the mean losses of a step: the sums are taken in another order. Seen: 1e-7."""


def test_every_sample_once_in_worlds_of_4_2_and_3_ranks(worlds_story: Story) -> None:
    """Each attempt has as many ranks as the job has nodes, goes on where the last one stopped, and
    every sample of every epoch is seen by exactly one rank, in one attempt."""
    training = worlds_story.training
    attempts = training.attempts()
    assert [attempt.ending for attempt in attempts[:-1]].count(None) == 0, training.log()
    assert len(attempts) == len(WORLDS)
    assert steps_lost(attempts) == 0, attempts
    ranks = Counter(
        event.data["attempt"]
        for rank in range(max(WORLDS))
        for event in training.events_of(rank, EventKind.FIRST_STEP)
    )
    assert [ranks[attempt] for attempt in range(1, len(WORLDS) + 1)] == list(WORLDS)
    result = training.result
    assert result["steps_trained_twice"] == 0
    assert result["steps_missing"] == []
    assert all(result["every_sample_once"])


def test_the_loss_is_that_of_the_world_that_never_changed(
    comparable_alone: dict[str, Any], worlds_story: Story
) -> None:
    """The global batches are those of a single rank, and so is their mean loss, step by step, up to
    rounding."""
    means = worlds_story.training.result["mean_losses"]
    wanted = comparable_alone["mean_losses"]
    differences = [abs(one - other) for one, other in zip(means, wanted, strict=True)]
    assert max(differences) < TOLERANCE, differences


def test_the_slurmd_of_a_node_is_killed(worlds_story: Story) -> None:
    """Slurm takes the node for dead, and requeues the job: the rank on the other node is told to
    stop, and the one that lives on without a slurmd saves with it; no step is lost, and the job
    goes on without that node."""
    training = worlds_story.training
    (step,) = {
        event.step
        for rank in range(WORLDS[1])
        for event in training.events_of(rank, EventKind.SAFE_POINT, attempt=2)
    }
    attempts = training.attempts()
    assert attempts[1].end_step == attempts[2].step == step, training.log()
    for rank in range(WORLDS[1]):
        # for the stop, or a periodic one of that very step
        save = training.events_of(rank, EventKind.SAVE_COMMITTED, attempt=2)[-1]
        assert save.data["checkpoint_step"] == step
    (lost,) = worlds_story.seen["lost"]
    assert lost not in worlds_story.seen["nodes"]
