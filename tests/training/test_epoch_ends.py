"""What lies between the last batch of an epoch and the first of the next: done once, whoever ends
the attempt there, and with the bits of a run that was left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.states import same
from training.loop import STEPS_PER_EPOCH, Training, ask_for_stop

import hydroslurm
from hydroslurm.errors import UsageError

# torch means a first epoch; it says it too where an attempt goes on behind the last step of one
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
EPOCHS = 3
STOPPED, KILLED = "stopped", "killed"


class Killed(BaseException):
    """The end of an attempt that had no time to save."""


class Epochs(Training):
    """One scheduler step per epoch, and an evaluation that draws random numbers."""

    def step(self, batch: Any) -> None:
        self.learn(batch)

    def evaluate(self) -> None:
        for x, _ in self.loader:  # making its iterator draws, and so does dropout
            self.run.check_stop()
            with torch.no_grad():
                self.model(x)


def with_batches(training: Epochs, at: Callable[[str], None]) -> None:
    run = training.run
    run.resume()
    while run.epoch < EPOCHS:
        for batch in run.batches(epochs=run.epoch + 1):
            training.step(batch)
        at("loop")
        with run.evaluation():
            at("evaluation")
            training.evaluate()
        at("evaluated")
        training.scheduler.step()
        at("scheduler")
        run.check_stop()
        run.save()
        at("saved")
        run.check_stop()
    assert list(run.batches(epochs=EPOCHS)) == []  # and the random numbers are those of this place


def counting_itself(training: Epochs, at: Callable[[str], None]) -> None:
    run = training.run
    run.resume()
    while run.epoch < EPOCHS:
        while run.step < (run.epoch + 1) * STEPS_PER_EPOCH:
            training.step((torch.randn(4, 6), torch.randint(0, 3, (4,))))
            run.step += 1
            run.safe_point()
        with run.evaluation():
            at("evaluation")
            training.evaluate()
        training.scheduler.step()
        run.epoch += 1
        at("counted")
        run.check_stop()


def attempt(
    folder: Path, loop: Any, *, place: str = "", epoch: int = -1, how: str = STOPPED, **options: Any
) -> Epochs:
    """Train to the end, or until this place is reached in this epoch."""
    training = Epochs(folder, **options)
    run, steps = training.run, (epoch + 1) * STEPS_PER_EPOCH

    def at(name: str) -> None:
        if (name, run.step) == (place, steps):
            if how == KILLED:
                raise Killed
            ask_for_stop(run)

    try:
        loop(training, at)
    except (SystemExit, Killed):
        assert place, "nobody has asked for the end of this one"
    else:
        assert not place or place == "saved", f"{place} of epoch {epoch} was passed"
    run.close()
    if hydroslurm.is_installed():
        hydroslurm.uninstall()
    return training


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    return attempt(tmp_path_factory.mktemp("alone"), with_batches).bits()


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("loop", STOPPED), ("loop", KILLED), ("evaluation", STOPPED), ("evaluated", KILLED),
        ("scheduler", STOPPED), ("scheduler", KILLED), ("saved", STOPPED),
    ],
)  # fmt: skip
def test_behind_the_batches_nothing_is_lost_or_done_twice(
    place: str, how: str, tmp_path: Path, alone: tuple[Any, ...]
) -> None:
    """Between any two lines that follow the batches of the first epoch and then of the last; also
    where a periodic save is at the last step already."""
    options = {"every_steps": STEPS_PER_EPOCH if place == "scheduler" else 0}
    for epoch in (0, EPOCHS - 1):
        attempt(tmp_path, with_batches, place=place, epoch=epoch, how=how, **options)
    last = attempt(tmp_path, with_batches)
    assert same(last.bits(), alone)
    assert last.run.step == EPOCHS * STEPS_PER_EPOCH


def test_a_loop_of_ones_own_is_exact_too(tmp_path: Path) -> None:
    """Stopped in an evaluation, and behind the count of the epoch where a periodic save has its
    step: that epoch is not trained again."""
    options = {"every_steps": 5, "loader": None}
    alone = attempt(tmp_path / "alone", counting_itself, **options)
    places = [("evaluation", 0), ("counted", 0), ("counted", 1), ("evaluation", 2), ("counted", 2)]
    for place, epoch in places:
        attempt(tmp_path / "run", counting_itself, place=place, epoch=epoch, **options)
    last = attempt(tmp_path / "run", counting_itself, **options)
    assert last.losses.values == alone.losses.values
    assert last.scheduler.last_epoch == alone.scheduler.last_epoch == EPOCHS


def test_a_periodic_save_of_the_very_state_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop behind the last step of an epoch, before anybody could change anything."""
    training = Training(tmp_path, every_steps=STEPS_PER_EPOCH)
    start = training.run._session.saver.start
    then_ask = lambda *args, **options: (start(*args, **options), ask_for_stop(training.run))[0]  # noqa: E731
    monkeypatch.setattr(training.run._session.saver, "start", then_ask)
    with pytest.raises(SystemExit):
        training.train(epochs=2)
    (only,) = training.run.dir.checkpoints.iterdir()
    assert only.name == f"step-{STEPS_PER_EPOCH:09d}"


def test_where_a_block_cannot_be_begun_anew_it_is_refused(tmp_path: Path) -> None:
    """In the body of the loop, within another one, with a save in it: an error that says where."""
    training = Training(tmp_path, every_steps=0)
    run = training.run
    for number, batch in enumerate(run.batches(epochs=1)):
        training.step(batch)
        if number == 3:
            with pytest.raises(UsageError, match="behind a loop over run"), run.evaluation():
                pass
    with run.evaluation():
        with pytest.raises(UsageError, match="save behind the block"):
            run.save()
        with pytest.raises(UsageError, match="in another one"), run.evaluation():
            pass
    run.close()


def test_a_folder_that_is_moved_away_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves make it anew: nobody looks for the earlier ones in it, or is told at each save."""
    training = Training(tmp_path / "run", every_steps=2)
    with caplog.at_level("WARNING", logger="hydroslurm"):
        for number, batch in enumerate(training.run.batches(epochs=1)):
            training.step(batch)
            if number == 4:
                training.run._session.saver.wait()  # or that save fails, which is told besides
                (tmp_path / "run").rename(tmp_path / "renamed")
    training.run.close()
    said = [line for line in caplog.messages if "renamed or removed while this run trains" in line]
    assert len(said) == 1
    assert str(tmp_path / "run") in said[0]
