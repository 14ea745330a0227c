"""Several ranks of one run: whichever is signalled, all stop behind one step, and go on."""

from __future__ import annotations

import re
import signal

import pytest
from coordination.attempts import Story
from processes import Child, wait_until

import hydroslurm
from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import MUST_NOT_RUN_AGAIN, RUN_AGAIN
from hydroslurm.core.fence import Fence
from hydroslurm.observe.doctor.gather import last_save

WORLD = 3


@pytest.mark.parametrize("told", [True, False])
def test_a_newer_attempt_ends_all_ranks_of_the_older_one(told: bool, story: Story) -> None:
    """The folder is claimed while they train, and one of them hears SIGTERM, or none: all leave
    with 93 and have saved nothing."""
    attempt = story.begin(WORLD, every_steps=3, epochs=9999, hold={"rank": "all", "at": "step 5"})
    for _ in range(WORLD):
        story.crew.expect("rank ")
    wait_until((story.run.checkpoints / "step-000000003").exists, "the save of step 3")
    Fence(story.run.claim_json).claim()
    before = story.run.attempts_jsonl.read_text()
    if told:
        attempt.signal(1)
    story.go()
    assert set(attempt.end().codes.values()) == {MUST_NOT_RUN_AGAIN}, attempt.said
    assert "Only the newest attempt" in attempt.said
    assert [path.name for path in story.run.checkpoints.iterdir()] == ["step-000000003"]
    assert story.run.attempts_jsonl.read_text() == before


def test_saves_by_the_clock_are_of_one_step(
    story: Story, crew: Child, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """every_s is measured by one rank, and all save behind one step; the run is not changed by
    it."""
    alone = Story(crew, tmp_path_factory.mktemp("alone"))
    for run, options in ((alone, {}), (story, {"every_s": 0.01})):
        ended = run.live(WORLD, **options)
        assert set(ended.codes.values()) == {0}, ended.said
    assert story.committed(0)
    assert story.committed(0) == story.committed(1) == story.committed(2)
    assert story.out.read_text() == alone.out.read_text()


def test_a_run_that_loses_work_saves_more_often(story: Story) -> None:
    """Killed after its saves were measured, it does not wait for every_s: all ranks save behind one
    step, the log has the reason, and the doctor reads it from the checkpoint. A stop is no loss."""
    attempt = story.begin_training(WORLD, every_s=0.05, epochs=9999)
    story.wait_for(EventKind.SAVE_COMMITTED, world=WORLD, times=3)
    for rank in range(WORLD):
        attempt.signal(rank, signal.SIGKILL)
    attempt.end()
    for _ in range(2):
        before = [story.committed(rank) for rank in range(WORLD)]
        again = story.begin(WORLD, every_s=3600, epochs=9999)
        wait_until(lambda known=before[0]: story.committed(0) > known, "a save by the clock")
        again.signal(1)
        assert set(again.end().codes.values()) == {RUN_AGAIN}, again.said
        assert re.search(r"losses of work in \S+ h: 1 .* -> .*every_s=3600 bounds it", again.said)
        first, *others = (story.committed(rank) - before[rank] for rank in range(WORLD))
        assert others == [first, first]
    save = last_save(story.run.root)
    assert save is not None
    assert save.cadence is not None
    assert (save.cadence.losses, save.cadence.every_s) == (1, 3600)
    assert save.cadence.interval_s < 3600


def stop_in_an_epoch(story: Story, world: int, *, rank: int, **options: str) -> None:
    """All leave when one rank is told."""
    attempt = story.begin(world, **options, hold={"rank": rank, "at": "step 6"})
    story.crew.expect(f"rank {rank} at")
    attempt.signal(rank)
    story.wait_for(EventKind.STOP_REQUESTED, world=world)
    story.go()
    assert set(attempt.end().codes.values()) == {RUN_AGAIN}, attempt.said


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
    assert set(whole.live(2, **options).codes.values()) == {0}
    stop_in_an_epoch(story, 2, rank=1, **options)
    again = story.live(2, **options)
    assert set(again.codes.values()) == {0}, again.said
    assert story.out.read_text() == whole.out.read_text()
    for rank in range(2):
        assert story.steps(rank) == whole.steps(rank)


def test_a_job_ends_where_its_first_rank_says(story: Story) -> None:
    """A stop signal that is true on rank 0 alone ends the job on all; its checkpoints are of both
    ranks, and what was one rank's own can be read. One that goes back to an epoch trains the same
    bits again on each rank."""
    attempt = story.live(2, kind="job", epochs=2)
    assert set(attempt.codes.values()) == {0}, attempt.said
    assert attempt.said.count("epochs 2") == 2
    manager = hydroslurm.MultiNodeCheckpointManager(story.run.root)
    assert manager.epochs() == (0, 1, 2)
    found = manager.find(epoch=1)
    assert found.manifest.world_size == 2
    own = CheckpointStore(found.path.parent).load_own(found, 1)
    assert own["counters"] == {"step": 4, "epoch": 1}
    again = story.live(2, kind="job", epochs=2)
    assert set(again.codes.values()) == {0}, again.said
    assert "it is loaded" in again.said
    back = story.live(2, kind="job", epochs=2, back_to=1)
    assert set(back.codes.values()) == {0}, back.said
    for rank in range(2):
        steps = story.steps(rank)
        assert steps[8:] == steps[4:8]
