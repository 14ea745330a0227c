"""Run in one process: stopped, continued, refused, and never losing a step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint.states import same
from processes import captured
from torch import nn
from training.loop import STEPS_PER_EPOCH, Training, ask_for_stop

import hydroslurm
from hydroslurm.core.exitcodes import MUST_NOT_RUN_AGAIN, RUN_AGAIN
from hydroslurm.errors import RunFolderError, UnsavableState, UsageError
from hydroslurm.training import rank_group
from hydroslurm.training.attempts import AttemptLog, Limits

EPOCHS = 3


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """What a run that was left alone ends with."""
    training = Training(tmp_path_factory.mktemp("alone"))
    training.train(epochs=EPOCHS)
    return training.bits()


def stopped(training: Training, *, after: int) -> int:
    """Train until a stop; returns the exit status."""
    with pytest.raises(SystemExit) as leaving:
        training.train(epochs=EPOCHS, stop_after=after)
    hydroslurm.uninstall()
    return int(str(leaving.value.code))


@pytest.mark.parametrize("moments", [(3, 5, 9), (10, 10), (1, 1, 1, 1), (29,)])
def test_stopped_and_continued_it_ends_with_the_same_bits(
    moments: tuple[int, ...], tmp_path: Path, alone: tuple[Any, ...]
) -> None:
    """Stops in the middle of epochs, at their ends, and several within one."""
    for after in moments:
        assert stopped(Training(tmp_path), after=after) == RUN_AGAIN
    last = Training(tmp_path)
    last.train(epochs=EPOCHS)
    assert same(last.bits(), alone)
    attempts = AttemptLog(last.run.dir.attempts_jsonl).attempts()
    ends = [sum(moments[: n + 1]) for n in range(len(moments))]
    assert [attempt.step for attempt in attempts] == [0, *ends]
    assert [attempt.ending for attempt in attempts] == ["asked"] * len(moments) + ["finished"]


STOPPED = """
import os, signal, sys
from training.loop import Training
training = Training("run")
try:
    for number, batch in enumerate(training.run.batches(epochs=1000)):
        if number == 2:
            before = set(sys.modules)
            os.kill(os.getpid(), signal.SIGTERM)
        training.step(batch)
finally:
    print(sorted(set(sys.modules) - before))
    print(sorted(name for name in sys.modules if name.startswith("hydroslurm.slurm.")))
"""


@pytest.mark.parametrize("is_in_job", [False, True])
def test_a_stop_imports_nothing_and_outside_of_a_job_nothing_of_slurm_is_loaded(
    tmp_path: Path, is_in_job: bool
) -> None:
    """What a stop needs is there when the run begins: a parked thread may hold an import's lock."""
    job = {"SLURM_JOB_ID": "77", "SLURM_CONF": "/nowhere"} if is_in_job else {}
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **job}
    done = captured([sys.executable, "-c", STOPPED], cwd=tmp_path, env=environ, timeout=60)
    assert done.returncode == RUN_AGAIN, done.stderr
    new, of_slurm = done.stdout.splitlines()
    assert new == "[]"
    assert ("hydroslurm.slurm.stops" in of_slurm) is is_in_job
    assert is_in_job or of_slurm == "['hydroslurm.slurm.allocation']"


def test_more_epochs_after_the_end(tmp_path: Path, alone: tuple[Any, ...]) -> None:
    """Without `with` there is no marker: the same script with more epochs trains on, exactly."""
    for epochs in (1, EPOCHS):
        training = Training(tmp_path)
        for batch in training.run.batches(epochs=epochs):
            training.step(batch)
        training.run.close()
    assert same(training.bits(), alone)


def test_killed_it_goes_on_from_the_last_periodic_save(
    tmp_path: Path, alone: tuple[Any, ...]
) -> None:
    """An attempt that ends without a word costs the steps since its last save, and no bit."""
    killed = Training(tmp_path)
    for number, batch in enumerate(killed.run.batches(epochs=EPOCHS), start=1):
        killed.step(batch)
        if number == 11:
            break
    killed.run.close()
    again = Training(tmp_path)
    again.train(epochs=EPOCHS)
    attempts = AttemptLog(again.run.dir.attempts_jsonl).attempts()
    assert attempts[0].ending is None
    assert attempts[1].step in (4, 8)  # the save of step 8 is skipped if that of step 4 still runs
    assert same(again.bits(), alone)


def test_gradients_that_are_being_accumulated_are_not_cut(tmp_path: Path) -> None:
    """With accumulate=5 a save after the second batch is refused, for its gradients are in no
    state_dict, and a stop is obeyed after the fifth, as one step."""
    training = Training(tmp_path)
    batches = training.run.batches(epochs=1, accumulate=5)
    done: list[int] = []

    def train() -> None:
        for batch in batches:
            training.step(batch)
            done.append(1)
            if len(done) == 2:
                with pytest.raises(UsageError, match="2 of the 5 batches of step 1"):
                    training.run.save()
                ask_for_stop(training.run)

    with pytest.raises(SystemExit):
        train()
    assert (len(done), training.run.step) == (5, 1)


def test_a_save_in_the_body_of_the_loop_counts_its_batch(
    tmp_path: Path, alone: tuple[Any, ...]
) -> None:
    """save() and check_stop() behind the training of a batch: no batch is lost or seen twice."""
    first = Training(tmp_path, every_steps=0)

    def train() -> None:
        for number, batch in enumerate(first.run.batches(epochs=EPOCHS), start=1):
            first.step(batch)
            if number == 6:
                first.run.save()
            if number == 8:
                ask_for_stop(first.run)
                first.run.check_stop()

    with pytest.raises(SystemExit):
        train()
    hydroslurm.uninstall()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000000006", "step-000000008"]
    again = Training(tmp_path)
    again.train(epochs=EPOCHS)
    assert again.run.step == EPOCHS * STEPS_PER_EPOCH
    assert same(again.bits(), alone)


@pytest.mark.parametrize("moment", ["before the first step", "noted and not told yet"])
def test_a_stop_that_is_obeyed_at_once(moment: str, tmp_path: Path) -> None:
    """During start-up, before the first batch; and by the safe point, where the controller's thread
    has told nobody yet."""
    training = Training(tmp_path)
    if moment == "before the first step":
        ask_for_stop(training.run)
    else:
        training.run._session.controller._on_stop.clear()
    assert stopped(training, after=2) == RUN_AGAIN
    assert len(training.losses.values) == (0 if moment == "before the first step" else 2)


def test_a_full_disk_costs_no_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the attempt cannot be recorded: it leaves to be started again all the same."""

    def full(*_: Any, **__: Any) -> None:
        raise RunFolderError("No space left on device")

    monkeypatch.setattr(AttemptLog, "end", full)
    assert stopped(Training(tmp_path), after=2) == RUN_AGAIN
    assert "No space left on device" in caplog.text


def test_what_somebody_has_to_see_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows after logging.basicConfig(), and after a dictConfig() that names other loggers."""
    monkeypatch.setattr(rank_group.LOGGER, "disabled", True)
    with caplog.at_level("WARNING", logger="hydroslurm"):
        rank_group.notice("a new run")
        rank_group.warning("nothing was saved")
    assert caplog.messages == ["nothing was saved"]


def test_a_spent_budget_ends_with_93(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Failures have a budget of their own; stops do not count against it."""
    limits = Limits(failures=1, attempts_without_progress=None)
    stopped(Training(tmp_path, limits=limits), after=2)
    for _ in range(2):
        failing = Training(tmp_path, limits=limits)
        failing.learn = lambda _: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            failing.train(epochs=EPOCHS)
    last = Training(tmp_path, limits=limits)
    with caplog.at_level("WARNING", logger="hydroslurm"), pytest.raises(SystemExit) as leaving:
        last.run.resume()
    assert leaving.value.code == MUST_NOT_RUN_AGAIN
    assert "2 failures" in caplog.text


def test_what_cannot_be_saved_is_told_at_the_first_step(tmp_path: Path) -> None:
    """Not at the first preemption: an open file in a registered object ends the first step."""

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"log": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    training = Training(tmp_path)
    training.run.register("odd", Odd())
    with pytest.raises(UnsavableState, match=r"odd.*log"):
        training.train(epochs=1)
    assert len(training.losses.values) == 1


def test_a_save_that_fails_at_a_stop_still_leaves_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full at the worst moment: the reason is told, the process leaves with 75, and
    the next attempt goes on from what was committed."""
    training = Training(tmp_path, every_steps=0)
    training.run.resume()
    training.run.save()
    (tmp_path / "checkpoints").rename(tmp_path / "kept")
    (tmp_path / "checkpoints").write_text("no folder any more")
    with caplog.at_level("WARNING", logger="hydroslurm"):
        assert stopped(training, after=2) == RUN_AGAIN
    assert "the save failed" in caplog.text
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "kept").rename(tmp_path / "checkpoints")
    again = Training(tmp_path)
    assert again.run.resume() is True
    assert again.run.step == 0
    again.run.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every_steps": -1}, "every_steps=-1"),
        ({"extra": {"model": nn.Linear(1, 1)}}, "'model' is already registered"),
        ({"loader": 3}, "int"),
        ({"on_save_error": "ignore"}, "ignore"),
        ({"directory": ""}, 'directory="": wanted'),  # an empty variable more often than a wish
        ({"directory": None, "environ": {}}, "directory="),  # in a folder that nobody named
    ],
)
def test_wrong_arguments_are_told_at_once(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each names what was seen; nothing stays installed behind it, or was written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        hydroslurm.Run(model=nn.Linear(1, 1), **{"directory": tmp_path, **options})
    assert not hydroslurm.is_installed()
    assert "directory" not in options or list(tmp_path.iterdir()) == []
