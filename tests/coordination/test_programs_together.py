"""Runs, jobs, and loops that save by themselves, on several ranks: stopped and continued."""

from __future__ import annotations

import pytest
from coordination.attempts import Story
from processes import Child

import hydroslurm
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import RUN_AGAIN

WORLD = 2


@pytest.mark.parametrize(
    ("kind", "model"), [("run", "ddp"), ("run", "fsdp"), ("job", "ddp"), ("own", "ddp")]
)
def test_stopped_and_continued(
    kind: str, model: str, story: Story, crew: Child, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One rank is told to stop in the middle of an epoch: all leave behind one step, and the next
    attempt ends with the bits of the one that was left alone."""
    whole = Story(crew, tmp_path_factory.mktemp("whole"))
    options = {"kind": kind, "model": model}
    assert set(whole.live(WORLD, **options).codes.values()) == {0}
    attempt = story.begin(WORLD, **options, hold={"rank": 1, "at": "step 6"})
    story.crew.expect("rank 1 at")
    attempt.signal(1)
    story.wait_for(EventKind.STOP_REQUESTED, world=WORLD)
    story.go()
    assert set(attempt.end().codes.values()) == {RUN_AGAIN}, attempt.said
    again = story.live(WORLD, **options)
    assert set(again.codes.values()) == {0}, again.said
    assert story.out.read_text() == whole.out.read_text()
    for rank in range(WORLD):
        assert story.steps(rank) == whole.steps(rank)


def test_a_job_ends_where_its_first_rank_says(story: Story) -> None:
    """A stop signal that is true on rank 0 alone ends the job on all; its checkpoints are of both
    ranks, and what was one rank's own can be read."""
    attempt = story.live(WORLD, kind="job", epochs=2)
    assert set(attempt.codes.values()) == {0}, attempt.said
    assert attempt.said.count("epochs 2") == WORLD
    manager = hydroslurm.MultiNodeCheckpointManager(story.run.root)
    assert manager.epochs() == (0, 1, 2)
    found = manager.find(epoch=1)
    assert found.checkpoint.manifest.world_size == WORLD
    assert found.store.load_own(found.checkpoint, 1)["counters"] == {"step": 4, "epoch": 1}
    again = story.live(WORLD, kind="job", epochs=2)
    assert set(again.codes.values()) == {0}, again.said
    assert "it is loaded" in again.said
