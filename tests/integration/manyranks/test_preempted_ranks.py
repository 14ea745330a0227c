"""The promise, for several ranks on a real Slurm: a training of three ranks that is suspended,
preempted and requeued ends with the bits of one that nobody stops; and one that comes back with
another number of nodes, with each sample once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from integration.manyranks.acts import SUSPENDED_S, WORLDS, Story
from training.trainings import steps_lost

from hydroslurm.core.events import EventKind

pytestmark = pytest.mark.slurm
Result = dict[str, Any]


@pytest.mark.scene("ddp")
def test_ddp_ends_with_the_same_bits(undisturbed: Result, story: Story) -> None:
    """A suspend and a preemption, and a suspend of ten times the time-out of its collectives in the
    next attempt: weights, optimizer, and on every rank the loss and the samples of each step are
    those of the run that nobody stops; no step is lost or trained twice."""
    training = story.training
    made = training.attempts()
    endings = Counter(attempt.ending for attempt in made)
    assert len(made) == 2, training.log()
    assert endings["finished"] == 1
    assert endings["error"] == endings[None] == 0
    assert steps_lost(made) == 0, made
    result = training.result
    assert result["steps_trained_twice"] == 0
    assert all(result["every_sample_once"])
    assert result == undisturbed
    for rank in range(training.world):
        parked = training.events_of(rank, EventKind.ALL_PARKED)
        assert [event.data["in_flight"] for event in parked] == [0] * 2
        assert len(training.events_of(rank, EventKind.RESUMED)) == 2
        (resumed,) = training.events_of(rank, EventKind.RESUMED, attempt=2)
        assert resumed.data["parked_s"] >= SUSPENDED_S
        assert not training.events_of(rank, EventKind.AGREEMENT_FAILED)


TOLERANCE = 1e-5
"""Between the mean losses of a step: the sums are taken in another order. Seen: 1e-7."""


@pytest.mark.scene("worlds")
def test_every_sample_once_in_worlds_of_3_2_and_3_ranks(undisturbed: Result, story: Story) -> None:
    """Each attempt has as many ranks as the job has nodes and goes on where the last one stopped.
    Every sample comes once, and the mean loss of each step is that of a single rank."""
    training = story.training
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
    assert (result["steps_trained_twice"], result["steps_missing"]) == (0, [])
    assert all(result["every_sample_once"])
    losses = zip(result["mean_losses"], undisturbed["mean_losses"], strict=True)
    assert max(abs(one - other) for one, other in losses) < TOLERANCE


@pytest.mark.scene("worlds")
def test_the_slurmd_of_a_node_is_killed(story: Story) -> None:
    """Slurm takes the node for dead, and requeues the job: the rank on the other node is told to
    stop, and the one that lives on without a slurmd saves with it; no step is lost, and the job
    goes on without that node."""
    training = story.training
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
    (lost,) = story.seen["lost"]
    assert lost not in story.seen["nodes"]
