"""What reaches only some of the ranks of a training, on a real Slurm: one job, whose first four
attempts end each in another way."""

from __future__ import annotations

from typing import Any

import pytest
from integration.manyranks.acts import Story
from integration.manyranks.rankstraining import EVERY_STEPS

from hydroslurm.core.events import EventKind

pytestmark = pytest.mark.slurm

RANKS = range(4)


def test_one_task_is_told_to_stop(mixed_story: Story) -> None:
    """SIGTERM to rank 2 alone: all ranks save behind one step, the job is requeued once, and goes
    on from there."""
    _saved_together(mixed_story, attempt=1)
    training = mixed_story.training
    for rank in RANKS:
        agreed = training.events_of(rank, EventKind.STOP_AGREED, attempt=1)
        assert {event.data["of_rank"] for event in agreed} <= {2, None}
    assert "received by rank 2" in training.log()


def test_stopped_while_paused(mixed_story: Story) -> None:
    """SIGUSR1 to rank 1 alone parks all, with nothing in flight; a requeue then ends the pause on
    all of them, and all save behind one step."""
    training = mixed_story.training
    for rank in RANKS:
        (parked,) = training.events_of(rank, EventKind.ALL_PARKED, attempt=2)
        assert parked.data["in_flight"] == 0
        assert parked.data["of_ranks"] == [1]
    _saved_together(mixed_story, attempt=2)


def test_a_rank_dies_in_the_middle_of_a_stop(mixed_story: Story) -> None:
    """Rank 3 is killed after rank 1 was told to stop and before all have stopped: nothing is saved
    without it, the log says why, and the job goes on from the newest whole checkpoint, which the
    last attempt has made on its way."""
    training = mixed_story.training
    before, after = training.attempts()[2:4]
    assert before.step < after.step
    assert after.step % EVERY_STEPS == 0
    saved = training.events_of(0, EventKind.SAVE_COMMITTED, attempt=3)
    assert {event.data["save_kind"] for event in saved} == {"periodic"}
    assert after.step == max(event.data["checkpoint_step"] for event in saved)
    # a rank that was inside a collective has torch's own words for it
    log = training.log()
    assert "cannot be saved" in log or "closed by peer" in log or "reset by peer" in log


def test_the_slurmd_of_a_node_is_killed(mixed_story: Story) -> None:
    """Slurm takes the node for dead, and requeues the job: the ranks on the other nodes are told to
    stop, and the one that lives on without a slurmd saves with them; no step is lost, and the job
    goes on without that node."""
    _saved_together(mixed_story, attempt=4)
    (lost,) = mixed_story.seen["lost"]
    assert lost not in mixed_story.seen["nodes"]


def test_after_all_that_it_ends_with_the_same_bits(
    mixed_story: Story, ddp_alone: dict[str, Any]
) -> None:
    """Only the steps between the last checkpoint and the death of rank 3 were trained twice."""
    training = mixed_story.training
    attempts = training.attempts()
    assert len(attempts) == 5, training.log()
    assert attempts[-1].ending == "finished"
    result = training.result
    assert result.pop("steps_trained_twice") > 0
    assert result == {name: ddp_alone[name] for name in result}


def _saved_together(story: Story, *, attempt: int) -> None:
    """All ranks have stopped behind one step, and the next attempt begins there."""
    training = story.training
    attempts = training.attempts()
    (step,) = {
        event.step
        for rank in RANKS
        for event in training.events_of(rank, EventKind.SAFE_POINT, attempt=attempt)
    }
    assert attempts[attempt - 1].end_step == attempts[attempt].step == step, training.log()
    for rank in RANKS:
        saves = training.events_of(rank, EventKind.SAVE_COMMITTED, attempt=attempt)
        assert (saves[-1].data["save_kind"], saves[-1].data["checkpoint_step"]) == ("stop", step)
        assert len(training.events_of(rank, EventKind.ALL_PARKED, attempt=attempt)) == (
            attempt == 2
        )
