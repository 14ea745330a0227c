"""A job stopped in each of its groups, and run again until it is done."""

from __future__ import annotations

import shutil
import signal
from typing import Any

import pytest
from training.jobrunner_story import WHOLE, Attempt, Story, since, until

from hydroslurm.compat.manager import CheckpointManager

SETUP = ["download", "build"]


def _returned(attempt: Attempt) -> str:
    """The epochs that the runner has returned, and a hash of the weights after it."""
    return next(line for line in attempt.said.splitlines() if line.startswith("returned"))


@pytest.mark.parametrize("last_save", [{}, {"lose_epochs": "train 0.1", "lenient": True}])
def test_what_follows_a_finished_job_has_what_it_trained(story: Story, last_save: Any) -> None:
    """An export that fails after the runner is repeated with the trained weights, also where the
    last epoch could not be saved as usual. Without any checkpoint of them, the process ends with a
    line instead."""
    first = story.live(epochs=1, fail_after=True, **last_save)
    assert first.code == 1, first.said
    again = story.live(epochs=1)
    assert (again.code, again.diary) == (0, [*SETUP, "exit"] if last_save else SETUP), again.said
    assert _returned(again) == _returned(first)
    assert "this job has finished at step 4; it is loaded" in story.live(epochs=1).said
    for one in CheckpointManager(story.directory).committed():
        if one.step == 4:
            shutil.rmtree(one.path)
    gone = story.live(epochs=1)
    assert gone.code == 0
    assert "returned" not in gone.said
    assert "no checkpoint after step 0: what follows the JobRunner would not have" in gone.said


@pytest.mark.parametrize("hold", ["download", "build", "weights"])
def test_stopped_before_init_is_done(story: Story, undisturbed: str, hold: str) -> None:
    """Nothing is saved, and the next attempt begins anew, with all of init."""
    first = story.live(hold=hold)
    assert (first.code, first.diary) == (75, until(hold)), first.said
    assert "in this attempt" in first.said or "starts it over" in first.said
    second = story.live()
    assert (second.code, second.diary) == (0, WHOLE), second.said
    assert story.out.read_text() == undisturbed


@pytest.mark.parametrize(
    ("hold", "follows"),
    [
        # in the last function of init: its checkpoint is committed before the stop is obeyed
        ("first look", since("train 0.0")),
        # within an epoch: behind the step that was being made
        ("train 0.1", since("train 0.2")),
        # behind the last step: the function is called again and finds no batches left
        ("train 1.3", since("trained 1")),
        # behind the last safe point of a function: at the next one, between two functions
        ("trained 1", since("validate 1")),
        # in a function without batches: from its beginning
        ("validate 1", since("validate 1")),
        # while the end of the epoch is being looked at
        ("asked 1", since("train 1.0")),
        ("asked 3", since("exit")),
        ("exit", since("exit")),
    ],
)
def test_stopped_and_run_again(
    story: Story, undisturbed: str, hold: str, follows: list[str]
) -> None:
    """SIGTERM in any group ends the attempt with 75; the next one goes on from there, and ends with
    the same bits as a run that was left alone."""
    first = story.live(hold=hold)
    assert (first.code, first.diary) == (75, until(hold)), first.said
    second = story.live()
    assert (second.code, second.diary) == (0, [*SETUP, *follows]), second.said
    assert story.out.read_text() == undisturbed
    assert CheckpointManager(story.directory).epochs() == (0, 1, 2, 3)


def test_an_output_outlives_a_stop_within_its_epoch(story: Story) -> None:
    """What a function returned before the stop still ends the job after that epoch."""
    assert story.live(hold="trained 1", last_epoch=1).code == 75
    second = story.live(last_epoch=1)
    assert second.diary == [*SETUP, "validate 1", "asked 2", "exit"], second.said
    assert "returned 2" in second.said


@pytest.mark.parametrize("place", ["first look", "train 1.2", "trained 1", "validate 2", "exit"])
def test_killed_and_run_again(story: Story, undisturbed: str, place: str) -> None:
    """SIGKILL loses what was not saved, repeats it, and changes nothing in the result."""
    assert story.live(hold=place, signo=signal.SIGKILL, every_steps=1).code == -signal.SIGKILL
    second = story.live(every_steps=1)
    assert second.code == 0, second.said
    assert story.out.read_text() == undisturbed
    assert ("weights" in second.diary) == (place == "first look")


def test_a_periodic_save_and_an_epoch_of_the_same_step(story: Story) -> None:
    """The periodic checkpoint behind the last step of an epoch does not stand in for the epoch's
    own: both are there, and the run goes on from the later one."""
    attempt = story.live(every_steps=1, hold="train 1.0")
    assert attempt.code == 75
    manager = CheckpointManager(story.directory)
    assert manager.epochs() == (0, 1)
    assert manager.find(step=4).checkpoint.kind == "epoch"
    assert manager.find(epoch=1).checkpoint.step == 4


def test_without_a_manager(story: Story) -> None:
    """Nothing is saved; a stop still leaves at the next safe point, and the next attempt begins
    anew."""
    story.saves = False
    first = story.live(hold="train 1.1")
    assert (first.code, first.diary) == (75, until("train 1.1"))
    assert "nothing is saved" in first.said
    assert story.live().diary == WHOLE
    assert not story.directory.exists()


def test_a_folder_in_use_does_not_change_the_status(story: Story) -> None:
    """A file that a thread writes while the run's temporary folder is being removed: the stop still
    ends with 75, or the job would not be requeued."""
    story.saves = False
    attempt = story.live(hold="train 0.1", late_file=str(story.folder))
    assert attempt.code == 75, attempt.said
    assert list(story.folder.rglob("late")), "the folder was not in use"


def test_keep(story: Story) -> None:
    """``keep`` counts epochs, and periodic saves do not push them out."""
    story.live(keep=2, every_steps=1)
    assert CheckpointManager(story.directory).epochs() == (2, 3)


# --- going back
# ------------------------------------------------------------------------------------------------


def test_resume_from_epoch(story: Story, undisturbed: str) -> None:
    """It goes back to that epoch in a folder of its own, which a restart goes on with, and leaves
    the run as it was."""
    story.live()
    before = sorted(path.name for path in (story.directory / "checkpoints").iterdir())
    first = story.live(back_to=1, hold="train 2.1")
    assert first.code == 75
    assert first.diary[:4] == ["download", "build", "asked 1", "train 1.0"]
    second = story.live(back_to=1)
    assert second.diary == [*SETUP, *since("train 2.2")]
    assert story.out.read_text() == undisturbed
    assert sorted(path.name for path in (story.directory / "checkpoints").iterdir()) == before
    branch = CheckpointManager(story.directory).branch(1)
    assert branch.epochs() == (1, 2, 3)
    assert story.live(back_to=1).diary == SETUP


def test_resume_from_an_epoch_that_is_not_there(story: Story) -> None:
    """The error lists the epochs that there are, before any function has run."""
    story.live(epochs=2)
    attempt = story.live(back_to=7)
    assert (attempt.code, attempt.diary) == (1, [])
    assert "no checkpoint of epoch 7" in attempt.said
    assert "there are epochs 0, 1, 2" in attempt.said


def test_a_save_before_the_batches_of_a_resumed_epoch(story: Story, undisturbed: str) -> None:
    """What was loaded stays as it is until the first batch is asked for: a save before it has the
    same position in the data and the same random numbers."""
    assert story.live(hold="train 1.1").code == 75
    assert story.live(save_anew=1, fail="train 1.2").code == 1
    assert story.live().diary == [*SETUP, *since("train 1.2")]
    assert story.out.read_text() == undisturbed
