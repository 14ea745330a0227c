"""The promise, for several ranks on a real Slurm: a training of four ranks on four nodes that is
suspended and preempted again and again ends with the bits of one that was left alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from integration.manyranks.acts import PREEMPTIONS, Story
from training.trainings import steps_lost

from hydroslurm.core.events import EventKind

pytestmark = pytest.mark.slurm


def test_ddp_ends_with_the_same_bits(ddp_alone: dict[str, Any], ddp_story: Story) -> None:
    """Five preemptions and five suspends: weights, optimizer, and on every rank the loss and the
    samples of each step are those of the run left alone; no step is lost or trained twice."""
    _ends_like(ddp_story, ddp_alone, PREEMPTIONS["ddp"])


def test_fsdp_ends_with_the_same_bits(fsdp_alone: dict[str, Any], fsdp_story: Story) -> None:
    """The same of FSDP2, three of each unless all are asked for."""
    _ends_like(fsdp_story, fsdp_alone, PREEMPTIONS["fsdp"])


def _ends_like(story: Story, alone: dict[str, Any], times: int) -> None:
    training = story.training
    attempts = training.attempts()
    endings = Counter(attempt.ending for attempt in attempts)
    assert len(attempts) == times + 1, training.log()
    assert endings["finished"] == 1
    assert endings["error"] == endings[None] == 0
    assert steps_lost(attempts) == 0, attempts
    result = training.result
    assert result["steps_trained_twice"] == 0
    assert all(result["every_sample_once"])
    assert result == alone
    for rank in range(4):
        parked = training.events_of(rank, EventKind.ALL_PARKED)
        assert [event.data["in_flight"] for event in parked] == [0] * times
        assert len(training.events_of(rank, EventKind.RESUMED)) == times
