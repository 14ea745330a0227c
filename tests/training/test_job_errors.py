"""What a job says and leaves behind when something in it fails."""

from __future__ import annotations

import pytest
from training.jobrunner_story import WHOLE, Story, since, until

from hydroslurm.compat.manager import CheckpointManager

SETUP = ["download", "build"]
GOES_ON = (
    "step-000000004) is committed: a restart resumes from there, in epoch 1, without init",
    [*SETUP, *since("train 1.0")],
)


@pytest.mark.parametrize(
    ("fail", "what", "outlook", "follows"),
    [
        ("download", "download of the download group", "starts over, with init", WHOLE),
        ("build", "build of the build group", "starts over, with init", WHOLE),
        ("weights", "weights of the init group", "starts over, with init", WHOLE),
        ("train 1.1", "train of the epoch group, in epoch 1,", *GOES_ON),
        ("validate 1", "validate of the epoch group, in epoch 1,", *GOES_ON),
        ("asked 2", "a stop signal after epoch 1", *GOES_ON),
        (
            "exit",
            "result of the exit group",
            "step-000000012) is committed: a restart runs the exit group again",
            [*SETUP, "exit"],
        ),
    ],
)
def test_a_function_fails(
    story: Story, undisturbed: str, fail: str, what: str, outlook: str, follows: list[str]
) -> None:
    """The error comes out as it is, the log says where it was and what a restart does, and a
    restart does that, with nothing lost."""
    first = story.live(fail=fail)
    assert (first.code, first.diary) == (1, until(fail))
    assert f"hydroslurm: {what} failed with ArithmeticError: failing at {fail}. " in first.said
    assert outlook in first.said
    assert f"\nArithmeticError: failing at {fail}" in first.said
    second = story.live()
    assert (second.code, second.diary) == (0, follows), second.said
    assert story.out.read_text() == undisturbed


def test_a_failing_save_warns_and_the_training_goes_on(story: Story) -> None:
    """With on_save_error="warn" each epoch that cannot be committed costs a warning, and a stop is
    still saved."""
    attempt = story.live(lose_epochs="train 0.1", lenient=True, hold="exit")
    assert attempt.diary == WHOLE
    assert attempt.said.count("was not saved") == 3
    assert "the checkpoint of epoch 2 was not saved" in attempt.said
    assert "step 12 is committed" in attempt.said
    again = story.live()
    assert (again.code, again.diary) == (0, [*SETUP, "exit"]), again.said
    assert CheckpointManager(story.directory).epochs() == (0, 3)


def test_a_failing_save_ends_the_job_where_that_is_wanted(story: Story) -> None:
    """With on_save_error="fail" the first one raises, and says what is committed."""
    attempt = story.live(lose_epochs="train 0.1", on_save_error="fail", every_steps=1)
    assert (attempt.code, attempt.diary[-1]) == (1, "asked 1")
    assert "saving the checkpoint of epoch 1 failed with SaveFailed" in attempt.said
    assert story.live().diary[2].startswith("train")
