"""Four ranks that are suspended for ten times the time-out of their collectives."""

from __future__ import annotations

import pytest
from integration.manyranks.acts import SUSPENDED_S, Story

from hydroslurm.core.events import EventKind

pytestmark = pytest.mark.slurm


def test_ddp_goes_on_after_a_long_suspend(long_ddp_story: Story) -> None:
    """In the middle of training, past SIGSTOP: all ranks are parked with nothing in flight, go on
    in the same processes, and finish in their first attempt."""
    _goes_on(long_ddp_story)


def test_fsdp_goes_on_after_a_long_suspend(long_fsdp_story: Story) -> None:
    """The same of FSDP2."""
    _goes_on(long_fsdp_story)


def _goes_on(story: Story) -> None:
    training = story.training
    assert [attempt.ending for attempt in training.attempts()] == ["finished"], training.log()
    assert all(training.result["every_sample_once"])
    for rank in range(4):
        (parked,) = training.events_of(rank, EventKind.ALL_PARKED)
        assert parked.data["in_flight"] == 0
        (resumed,) = training.events_of(rank, EventKind.RESUMED)
        assert resumed.data["parked_s"] >= SUSPENDED_S
        assert not training.events_of(rank, EventKind.AGREEMENT_FAILED)
