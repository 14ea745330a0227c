"""A job that is stopped, killed or fails in each of its groups, and is run again until it is
done."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from zygote import forked_program

from hydroslurm.compat.manager import CheckpointManager

PROGRAM = Path(__file__).with_name("attempts_of_a_job.py")
SETUP = ["download", "build"]
WHOLE = [*SETUP, "weights", "first look"]
"""The diary of a run that is left alone."""
for epoch in range(3):
    WHOLE += [*(f"train {epoch}.{step}" for step in range(4)), f"trained {epoch}"]
    WHOLE += [f"validate {epoch}", f"asked {epoch + 1}"]
WHOLE += ["exit"]
STOP, KILL, FAIL = 75, -signal.SIGKILL, 1
EXIT_AGAIN = "is committed: a restart runs the exit group again"
FROM_EPOCH_1 = [*SETUP, *WHOLE[WHOLE.index("train 1.0") :]]
OVER = "starts over, with init"
GOES_ON = "step-000000004) is committed: a restart resumes from there, in epoch 1, without init"


@dataclass
class Attempt:
    """One that is over: its exit status, what it said, and the diary entries that it wrote."""

    code: int
    said: str
    diary: list[str]


class Story:
    """The attempts of one run, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._attempts = folder, itertools.count(1)
        self.directory, self.out = folder / "run", folder / "out"
        self._diary = folder / "diary"
        self._diary.touch()

    def live(self, *, saves: bool = True, **options: Any) -> Attempt:
        """One attempt to its end. With ``hold`` it gets a SIGTERM there, or ``signo``."""
        signo = options.pop("signo", signal.SIGTERM)
        where = {"directory": str(self.directory)} if saves else {}
        given = {**where, "diary": str(self._diary), "out": str(self.out), **options}
        own, wrote = self._folder / f"attempt{next(self._attempts)}", self._diary.stat().st_size
        own.mkdir()
        with forked_program(PROGRAM, own, json.dumps(given)) as program:
            if "hold" in options:
                program.expect("at")
                program.signal(signo)
            code = program.end()
        return Attempt(code, str(program), self._diary.read_text()[wrote:].splitlines())


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """A run of the job in ``attempts_of_a_job.py`` that has not begun."""
    return Story(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the job comes to when it is left alone: a hash of weights, optimizer, losses and random
    numbers."""
    story = Story(tmp_path_factory.mktemp("undisturbed"))
    alone = story.live()
    assert (alone.code, alone.diary) == (0, WHOLE), alone.said
    return story.out.read_text()


def since(entry: str) -> list[str]:
    """What a run still writes from an entry on."""
    return WHOLE[WHOLE.index(entry) :]


def until(entry: str) -> list[str]:
    """What it has written when it is at an entry."""
    return WHOLE[: WHOLE.index(entry) + 1]


def _returned(attempt: Attempt) -> str:
    """The epochs that the runner has returned, and a hash of the weights after it."""
    return next(line for line in attempt.said.splitlines() if line.startswith("returned"))


@pytest.mark.parametrize(
    ("code", "place", "said", "follows"),
    [
        (STOP, "download", ["in this attempt"], WHOLE),
        (STOP, "weights", ["starts it over"], WHOLE),
        # in the last function of init: its checkpoint is committed before the stop is obeyed
        (STOP, "first look", [], [*SETUP, *since("train 0.0")]),
        # within an epoch: behind the step that was being made
        (STOP, "train 0.1", [], [*SETUP, *since("train 0.2")]),
        # behind the last step: the function is called again and finds no batches left
        (STOP, "train 1.3", [], [*SETUP, *since("trained 1")]),
        # behind the last safe point of a function: at the next one, between two functions
        (STOP, "trained 1", [], [*SETUP, *since("validate 1")]),
        # in a function without batches: from its beginning
        (STOP, "validate 1", [], [*SETUP, *since("validate 1")]),
        # while the end of the epoch is being looked at
        (STOP, "asked 3", [], [*SETUP, "exit"]),
        (STOP, "exit", [], [*SETUP, "exit"]),
        # what was not saved is lost and done again
        (KILL, "first look", [], WHOLE),
        (KILL, "validate 2", [], []),
        # the error comes out as it is, with where it was and what a restart does
        (FAIL, "build", ["build of the build group", OVER], WHOLE),
        (FAIL, "weights", ["weights of the init group", OVER], WHOLE),
        (FAIL, "train 1.1", ["train of the epoch group, in epoch 1,", GOES_ON], FROM_EPOCH_1),
        (FAIL, "asked 2", ["a stop signal after epoch 1", GOES_ON], FROM_EPOCH_1),
        (FAIL, "exit", ["result of the exit group", EXIT_AGAIN], [*SETUP, "exit"]),
    ],
)
def test_ended_anywhere_and_run_again(
    story: Story, undisturbed: str, code: int, place: str, said: list[str], follows: list[str]
) -> None:
    """The next attempt goes on from there, and ends with the same bits as a run that was left
    alone."""
    options: dict[int, dict[str, Any]] = {
        STOP: {"hold": place},
        KILL: {"hold": place, "signo": signal.SIGKILL, "every_steps": 1},
        FAIL: {"fail": place},
    }
    first = story.live(**options[code])
    assert (first.code, first.diary) == (code, until(place)), first.said
    assert all(words in first.said for words in said), first.said
    if code == FAIL:
        assert f"{said[0]} failed with ArithmeticError: failing at {place}. " in first.said
        assert f"\nArithmeticError: failing at {place}" in first.said
    second = story.live()
    assert second.code == 0, second.said
    assert second.diary == follows or ("weights" not in second.diary and not follows)
    assert story.out.read_text() == undisturbed
    assert CheckpointManager(story.directory).epochs() == (0, 1, 2, 3)


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


def test_an_output_outlives_a_stop_within_its_epoch(story: Story) -> None:
    """What a function returned before the stop still ends the job after that epoch."""
    assert story.live(hold="trained 1", last_epoch=1).code == STOP
    second = story.live(last_epoch=1)
    assert second.diary == [*SETUP, "validate 1", "asked 2", "exit"], second.said
    assert "returned 2" in second.said


def test_without_a_manager(story: Story) -> None:
    """Nothing is saved; a stop still leaves at the next safe point, and the next attempt begins
    anew."""
    first = story.live(hold="train 1.1", saves=False)
    assert (first.code, first.diary) == (STOP, until("train 1.1"))
    assert "nothing is saved" in first.said
    assert story.live(saves=False).diary == WHOLE
    assert not story.directory.exists()


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


def test_resume_from_epoch(story: Story, undisturbed: str) -> None:
    """It goes back to that epoch in a folder of its own, which a restart goes on with, and leaves
    the run as it was. One that is not there is an error before any function has run."""
    story.live()
    before = sorted(path.name for path in (story.directory / "checkpoints").iterdir())
    first = story.live(back_to=1, hold="train 2.1")
    assert first.code == STOP
    assert first.diary[:4] == ["download", "build", "asked 1", "train 1.0"]
    second = story.live(back_to=1)
    assert second.diary == [*SETUP, *since("train 2.2")]
    assert story.out.read_text() == undisturbed
    assert sorted(path.name for path in (story.directory / "checkpoints").iterdir()) == before
    assert CheckpointManager(story.directory).branch(1).epochs() == (1, 2, 3)
    assert story.live(back_to=1).diary == SETUP
    missing = story.live(back_to=7)
    assert (missing.code, missing.diary) == (1, [])
    assert "no checkpoint of epoch 7" in missing.said
    assert "there are epochs 0, 1, 2, 3" in missing.said


def test_a_save_before_the_batches_of_a_resumed_epoch(story: Story, undisturbed: str) -> None:
    """What was loaded stays as it is until the first batch is asked for: a save before it has the
    same position in the data and the same random numbers."""
    assert story.live(hold="train 1.1").code == STOP
    assert story.live(save_anew=1, fail="train 1.2").code == 1
    assert story.live().diary == [*SETUP, *since("train 1.2")]
    assert story.out.read_text() == undisturbed
