"""Run in one process: stopped, continued, refused, and never losing a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training.loop import STEPS_PER_EPOCH, Training, ask_for_stop, same

import hydroslurm
from hydroslurm.core.exitcodes import MUST_NOT_RUN_AGAIN, RUN_AGAIN, leaves_with
from hydroslurm.errors import RunFolderError, SaveFailed, StateMismatch, UnsavableState, UsageError
from hydroslurm.training import reporting
from hydroslurm.training.attempts import AttemptLog, Limits, settle_finished

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


def fail(run: hydroslurm.Run) -> None:
    """An attempt that ends by an exception."""

    def attempt() -> None:
        with run:
            run.resume()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        attempt()


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
    assert [attempt.step for attempt in attempts] == [
        0,
        *[sum(moments[: n + 1]) for n in range(len(moments))],
    ]
    assert [attempt.ending for attempt in attempts] == ["asked"] * len(moments) + ["finished"]


def test_a_finished_run_leaves_at_once(tmp_path: Path) -> None:
    """A restart of a finished run ends with status 0 before its first batch."""
    Training(tmp_path).train(epochs=1)
    leaves_with(0)
    settle_finished()  # as its process does at its end
    again = Training(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        again.train(epochs=1)
    assert leaving.value.code == 0
    assert again.losses.values == []


def test_more_epochs_after_the_end(tmp_path: Path, alone: tuple[Any, ...]) -> None:
    """Without `with` there is no marker: the same script with more epochs trains on, exactly."""
    first = Training(tmp_path)
    for batch in first.run.batches(epochs=1):
        first.step(batch)
    first.run.close()
    second = Training(tmp_path)
    for batch in second.run.batches(epochs=EPOCHS):
        second.step(batch)
    second.run.close()
    assert len(second.losses.values) == EPOCHS * STEPS_PER_EPOCH
    assert same(second.bits(), alone)


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


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """`run.step` and `run.safe_point()` are enough for a loop without a loader."""

    def attempt(stop_at: int | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        seen = []
        with hydroslurm.Run(model=model, directory=tmp_path, every_steps=0) as run:
            run.resume()
            for step in range(run.step, 6):
                with torch.no_grad():
                    model.weight += torch.rand(2, 2)
                seen.append(float(model.weight.detach().sum()))
                run.step = step + 1
                if run.step == stop_at:
                    ask_for_stop(run)
                run.safe_point()
        return seen

    with pytest.raises(SystemExit):
        attempt(stop_at=2)
    hydroslurm.uninstall()
    assert len(attempt(stop_at=None)) == 4


def test_gradients_that_are_being_accumulated_are_not_cut(tmp_path: Path) -> None:
    """With accumulate=5 a stop after the second batch is obeyed after the fifth, as one step."""
    training = Training(tmp_path)
    done = 0

    def train() -> None:
        nonlocal done
        for batch in training.run.batches(epochs=1, accumulate=5):
            training.step(batch)
            done += 1
            if done == 2:
                ask_for_stop(training.run)

    with pytest.raises(SystemExit):
        train()
    assert (done, training.run.step) == (5, 1)
    hydroslurm.uninstall()


def test_a_save_in_the_middle_of_an_accumulated_step_is_refused(tmp_path: Path) -> None:
    """The gradients of the batches so far are in no state_dict."""
    training = Training(tmp_path)
    batches = training.run.batches(epochs=1, accumulate=2)
    training.step(next(batches))
    with pytest.raises(UsageError, match="1 of the 2 batches of step 1"):
        training.run.save()
    training.step(next(batches))
    training.run.save()
    batches.close()
    training.run.close()


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
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-000000006",
        "step-000000008",
    ]
    again = Training(tmp_path)
    again.train(epochs=EPOCHS)
    assert again.run.step == EPOCHS * STEPS_PER_EPOCH
    assert same(again.bits(), alone)


def test_a_stop_before_the_first_step_saves_and_leaves(tmp_path: Path) -> None:
    """A stop during start-up is obeyed before the first batch."""
    training = Training(tmp_path)
    ask_for_stop(training.run)
    with pytest.raises(SystemExit) as leaving:
        training.train(epochs=1)
    assert leaving.value.code == RUN_AGAIN
    assert training.losses.values == []
    hydroslurm.uninstall()


def test_another_model_is_refused_with_the_keys(tmp_path: Path) -> None:
    """A checkpoint of another layout is not loaded; the message names what differs."""
    stopped(Training(tmp_path), after=2)
    other = Training(tmp_path, width=9)
    with pytest.raises(StateMismatch, match=r"0\.weight.*\[8, 6\].*\[9, 6\]"):
        other.run.resume()
    other.run.close()


def test_an_object_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    """What was registered since is named, and nothing is loaded half."""
    stopped(Training(tmp_path), after=2)
    other = Training(tmp_path)
    before = [weight.detach().clone() for weight in other.model.parameters()]
    other.run.register("ema", nn.Linear(1, 1))
    with pytest.raises(StateMismatch, match="no state for ema"):
        other.run.resume()
    assert all(torch.equal(a, b) for a, b in zip(before, other.model.parameters(), strict=True))
    other.run.close()


def test_a_flipped_bit_falls_back_with_a_warning_that_names_both(
    tmp_path: Path, alone: tuple[Any, ...]
) -> None:
    """The newest checkpoint is damaged: the one before is used, and the bits are right."""
    stopped(Training(tmp_path), after=9)
    newest = max((tmp_path / "checkpoints").iterdir())
    part = next(newest.glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    again = Training(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"step-000000009.*step-00000000[48]"):
        again.train(epochs=EPOCHS)
    assert same(again.bits(), alone)


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
    monkeypatch.setattr(reporting.LOGGER, "disabled", True)
    with caplog.at_level("WARNING", logger="hydroslurm"):
        reporting.notice("a new run")
        reporting.warning("nothing was saved")
    assert caplog.messages == ["nothing was saved"]


def test_a_spent_budget_ends_with_93(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Failures have a budget of their own; stops do not count against it."""
    limits = Limits(failures=1, attempts_without_progress=None)
    stopped(Training(tmp_path, limits=limits), after=2)
    for _ in range(2):
        fail(Training(tmp_path, limits=limits).run)
    last = Training(tmp_path, limits=limits)
    with caplog.at_level("WARNING", logger="hydroslurm"), pytest.raises(SystemExit) as leaving:
        last.run.resume()
    assert leaving.value.code == MUST_NOT_RUN_AGAIN
    assert "2 failures" in caplog.text


def test_a_failed_periodic_save_is_reported_at_the_next_safe_point(tmp_path: Path) -> None:
    """on_save_error="fail" raises, "warn" warns and trains on; neither is silent."""
    failing = Training(tmp_path, on_save_error="fail")
    failing.run.resume()
    (tmp_path / "checkpoints").write_text("a file where the folder should be")

    def train() -> None:
        with failing.run as run:
            for batch in run.batches(epochs=EPOCHS):
                failing.step(batch)
                run._saver.wait()

    with pytest.raises(SaveFailed):
        train()


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


def test_the_training_thread_may_be_first_to_see_a_stop(tmp_path: Path) -> None:
    """The controller's thread has noted the stop and not told anybody yet: the safe point obeys."""
    training = Training(tmp_path)
    training.run._controller._on_stop.clear()
    assert stopped(training, after=2) == RUN_AGAIN


def test_what_a_attempt_leaves_in_the_run_folder(tmp_path: Path) -> None:
    """Manifest, attempts and events tell who wrote what and why it ended."""
    stopped(Training(tmp_path), after=3)
    manifest = json.loads((tmp_path / "checkpoints/step-000000003/manifest.json").read_text())
    assert (manifest["step"], manifest["kind"]) == (3, "stop")
    kinds = [
        json.loads(line)["kind"]
        for line in (tmp_path / "events/rank-00000.jsonl").read_text().splitlines()
    ]
    wanted = ["attempt_began", "first_step", "stop_requested", "safe_point", "save_committed"]
    assert [kind for kind in kinds if kind in wanted] == wanted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every_steps": -1}, "every_steps=-1"),
        ({"extra": {"model": nn.Linear(1, 1)}}, "'model' is already registered"),
        ({"extra": {"n": 3}}, "int without state_dict"),
        ({"loader": 3}, "int"),
        ({"on_save_error": "ignore"}, "ignore"),
    ],
)
def test_wrong_arguments_are_told_at_once(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Each names what was seen; nothing stays installed behind it."""
    with pytest.raises(UsageError, match=words):
        hydroslurm.Run(model=nn.Linear(1, 1), **{"directory": tmp_path, **options})
    assert not hydroslurm.is_installed()


def test_outside_of_a_job_a_directory_is_wanted() -> None:
    """Nothing is written into a folder that nobody named."""
    with pytest.raises(UsageError, match="directory="):
        hydroslurm.Run(model=nn.Linear(1, 1), environ={})
