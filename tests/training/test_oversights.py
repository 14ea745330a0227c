"""What the writer of a loop can forget: found at the second step at the latest, with the fix."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.states import same
from processes import child
from torch import nn
from training.loop import Training, ask_for_stop

import hydroslurm
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import StateMismatch, UsageError
from hydroslurm.training.attempts import AttemptLog, finished_step, write_finished
from hydroslurm.training.checks import recompiles

STEPS = 6


class Loop:
    """A loop of one's own, whose writer has not called resume()."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        options = {"optimizer": self.optimizer, "every_steps": 0, **options}
        self.run = hydroslurm.Run(model=self.model, directory=directory, **options)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.rand(4, 2)).square().sum().backward()
        self.optimizer.step()

    def from_the_step_of_the_run(self, *, stop_at: int | None = None) -> None:
        while self.run.step < STEPS:
            self.train()
            self.run.step += 1
            if self.run.step == stop_at:
                ask_for_stop(self.run)
            self.run.safe_point()

    def from_0(self, *, steps: int = STEPS) -> None:
        for step in range(steps):
            self.train()
            self.run.step = step + 1
            self.run.safe_point()


def committed(directory: Path, *, steps: int = 3) -> None:
    """An attempt that has saved, and not finished."""
    first = Loop(directory)
    first.run.resume()
    first.from_0(steps=steps)
    first.run.save()
    first.run.close()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_the_first_look_at_the_step_resumes(tmp_path: Path) -> None:
    """Stopped and started again without resume(), a loop that asks for the step goes on from it,
    with the bits of one that was left alone; one that resumes behind such a look is right, too."""
    alone = Loop(tmp_path / "alone")
    alone.from_the_step_of_the_run()
    alone.run.close()
    first = Loop(tmp_path / "run")
    with pytest.raises(SystemExit):
        first.from_the_step_of_the_run(stop_at=2)
    hydroslurm.uninstall()
    again = Loop(tmp_path / "run")
    assert again.run.step == 2
    assert again.run.resume() is True  # tells what the look has done; a second one is a mistake
    with pytest.raises(UsageError, match="called already"):
        again.run.resume()
    again.from_the_step_of_the_run()
    again.run.close()
    attempts = AttemptLog(tmp_path / "run" / "attempts.jsonl").attempts()
    assert [attempt.step for attempt in attempts] == [0, 2]
    assert torch.equal(again.model.weight, alone.model.weight)


def test_the_epoch_is_looked_at_as_the_step(tmp_path: Path) -> None:
    """`for epoch in range(run.epoch, ...)` before the first batches() begins at the right one: the
    last, where nothing says that what follows its batches was done."""
    first = Training(tmp_path)
    for batch in first.run.batches(epochs=2):
        first.step(batch)
    first.run.close()
    for epoch in (1, 2):
        again = Training(tmp_path)
        assert again.run.epoch == epoch
        assert list(again.run.batches(epochs=2)) == []
        assert same(again.bits(), first.bits())
        again.run.save()
        again.run.close()


@pytest.mark.parametrize(
    "forgetting", ["loop", "count", "safe_point", "save", "finish", "look", "look by hand"]
)
def test_never_from_0_where_something_is_committed(forgetting: str, tmp_path: Path) -> None:
    """Trained, set, reached or saved before resume(): an error that names the checkpoint and the
    call; nothing is written, and the next start can go on. Without an optimizer the weights may
    have been changed by hand: a look is an error then, not a guess."""
    committed(tmp_path)
    again = Loop(tmp_path, **({"optimizer": None} if forgetting == "look by hand" else {}))
    if forgetting not in ("count", "look by hand"):
        again.train()
    with pytest.raises(UsageError, match=r"step 3 is committed.*run\.resume\(\)"):
        {
            "loop": again.from_0,
            "count": lambda: setattr(again.run, "step", 1),
            "safe_point": again.run.safe_point,
            "save": again.run.save,
            "finish": again.run.finish,
            "look": lambda: again.run.step,
            "look by hand": lambda: again.run.step,
        }[forgetting]()
    assert names(tmp_path) == ["step-000000003"]
    assert len(AttemptLog(tmp_path / "attempts.jsonl").attempts()) == 1
    assert finished_step(again.run.dir) is None
    assert again.run.resume() is True  # a script that warms its optimizer up, and then resumes
    again.run.close()


def test_a_checkpoint_that_does_not_fit_is_not_trained_over(tmp_path: Path) -> None:
    """A script that catches the error of resume() and goes on all the same does not begin at 0."""
    with pytest.raises(SystemExit):
        Training(tmp_path).train(epochs=1, stop_after=2)
    hydroslurm.uninstall()
    other = Training(tmp_path, width=9)
    with pytest.raises(StateMismatch, match=r"0\.weight.*\[8, 6\].*\[9, 6\]"):
        other.run.resume()
    assert other.run.step == 0
    with pytest.raises(UsageError, match="could not be loaded"):
        next(other.run.batches(epochs=1))
    with pytest.raises(UsageError, match="could not be loaded"):
        other.run.step = 1
    other.run.close()


def test_an_empty_folder_begins_and_is_claimed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first attempt trains; it holds the folder before its first save, and is told at its first
    step that the next attempt could not go on."""
    loop = Loop(tmp_path)
    assert not loop.run.dir.claim_json.exists()
    with caplog.at_level("WARNING", logger="hydroslurm"):
        loop.from_0()
    assert loop.run.dir.claim_json.exists()
    assert "run.resume() was not called" in caplog.text
    loop.run.close()


def test_a_stop_before_the_run_has_begun_overwrites_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a long start-up with check_stop(): it leaves to be started again, and saves nothing."""
    committed(tmp_path)
    again = Loop(tmp_path)
    ask_for_stop(again.run)
    with caplog.at_level("WARNING", logger="hydroslurm"), pytest.raises(SystemExit) as leaving:
        again.run.check_stop()
    assert leaving.value.code == 75
    assert "had not begun" in caplog.text
    assert names(tmp_path) == ["step-000000003"]


def test_told_to_begin_anew_it_sets_aside_what_is_there(tmp_path: Path) -> None:
    """resume=False trains from 0; the next attempt goes on from what that has saved, not from the
    older one, which is further; a marker of the end is no end of it."""
    committed(tmp_path, steps=5)
    write_finished(RunDir(tmp_path), step=5)
    anew = Loop(tmp_path, resume=False)
    anew.from_0(steps=2)
    anew.run.save()
    anew.run.close()
    assert (tmp_path / "checkpoints-set-aside-1" / "step-000000005").is_dir()
    next_one = Loop(tmp_path)
    assert next_one.run.step == 2
    next_one.run.close()


def test_a_restart_of_the_job_goes_on_all_the_same(tmp_path: Path) -> None:
    """resume=False in a script that Slurm requeues does not lose what its first start has saved."""
    committed(tmp_path)
    environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    again = Loop(tmp_path, resume=False, environ=environ)
    assert again.run.step == 3
    again.run.close()


# --- steps that nobody counts
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun_at", [0, 3])
def test_steps_that_nobody_counts_are_told_at_the_second(begun_at: int, tmp_path: Path) -> None:
    """The optimizer steps, run.step does not: an error with the fix, before anything is lost, in a
    first attempt and in a later one."""
    if begun_at:
        committed(tmp_path, steps=begun_at)
    loop = Loop(tmp_path)
    loop.run.resume()
    loop.train()
    loop.run.safe_point()
    loop.train()
    said = rf"run\.step is {begun_at}.*run\.step \+= 1; run\.safe_point\(\)"
    with pytest.raises(UsageError, match=said):
        loop.run.safe_point()
    loop.run.close()


def test_no_false_alarm(tmp_path: Path) -> None:
    """Accumulated gradients, an evaluation, safe points called twice, two networks in turns, a
    warm-up before the loop: no step goes uncounted there."""
    loop = Loop(tmp_path)
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    loop.run.register("other", other)
    loop.train()
    other.step()
    loop.run.resume()
    for _ in range(3):  # an evaluation
        loop.run.safe_point()
    for _ in range(3):  # batches of one step
        loop.model(torch.rand(4, 2)).sum().backward()
        loop.run.safe_point()
    for _ in range(3):
        other.step()
        loop.run.safe_point()
        loop.train()
        loop.run.step += 1
        loop.run.safe_point()
        loop.run.safe_point()
    loop.run.close()


def test_no_hook_stays_once_the_loop_counts(tmp_path: Path) -> None:
    """At the second safe point of a loop that counts, and from the start with batches()."""
    loop = Loop(tmp_path / "own")
    assert len(loop.optimizer._optimizer_step_post_hooks) == 1  # type: ignore[attr-defined]
    loop.from_0(steps=1)
    assert not loop.optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
    loop.run.close()
    training = Training(tmp_path / "batches")
    next(training.run.batches(epochs=1))
    assert not training.optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
    training.run.close()


# --- one Run, in the main thread
# ------------------------------------------------------------------------------------------------


def test_a_second_run_names_the_first(tmp_path: Path) -> None:
    """Both would answer one signal; behind the first one's close() there is place. None can be made
    outside of the main thread."""
    first = Loop(tmp_path / "first")
    with pytest.raises(UsageError, match=rf"a Run already, in {tmp_path}/first, .*close\(\)"):
        Loop(tmp_path / "second")
    assert not (tmp_path / "second").exists()
    first.run.close()
    with ThreadPoolExecutor(1, "trainer") as pool:
        error = pool.submit(Loop, tmp_path).exception()
    assert "thread 'trainer_0'; wanted the main thread" in str(error)
    assert not hydroslurm.is_installed()
    Loop(tmp_path / "second").run.close()


def test_a_forked_child_may_have_one_of_its_own(tmp_path: Path) -> None:
    """A Run in a forked child, whose parent has one, is its own process's first."""
    run = Loop(tmp_path / "parent").run
    if (pid := os.fork()) == 0:
        try:
            Loop(tmp_path / "child").run.close()
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    run.close()


# --- the end of the interpreter, names and arguments
# ------------------------------------------------------------------------------------------------

ENDS = {
    "falling off": "",
    "finish": "run.finish()",
    "close": "run.close()",
    "exit": "sys.exit(0)",
    "stop": "os.kill(os.getpid(), signal.SIGTERM)\nwhile True: run.check_stop()",
}


@pytest.mark.parametrize(
    "end", ["stop", *(pytest.param(end, marks=pytest.mark.long) for end in ENDS if end != "stop")]
)
def test_a_run_of_the_module_ends_without_a_word(end: str, tmp_path: Path) -> None:
    """With `run`, its gate and a cycle around both alive until the interpreter takes them down."""
    program = f"""
import os, signal, sys
import torch
import hydroslurm

model = torch.nn.Linear(2, 2)
run = hydroslurm.Run(model=model, directory="run", every_steps=0)
run.resume()
gate, cycle = run._session.controller.gate, [run]
cycle.append(cycle)
run.step += 1
run.safe_point()
{ENDS[end]}
"""
    with child(program, tmp_path) as process:
        assert process.wait() == (75 if end == "stop" else 0)
    lines = [line for line in process.lines if not line.startswith("hydroslurm: ")]
    assert lines == []


def test_a_compiled_model_that_a_resume_compiles_otherwise_is_named() -> None:
    """With a smaller last batch, where torch chooses for which sizes it compiles."""
    data = torch.utils.data.TensorDataset(torch.zeros(10, 2))
    model = nn.Linear(2, 2)

    def words(batch_size: int, *, drop_last: bool = False, **options: Any) -> str | None:
        loader = torch.utils.data.DataLoader(data, batch_size, drop_last=drop_last)
        return recompiles(torch.compile(model, backend="eager", **options), loader)

    assert "smaller last batch of an epoch (2 of 4)" in str(words(4))
    assert words(5) is words(4, drop_last=True) is words(4, dynamic=False) is None
    assert recompiles(model, torch.utils.data.DataLoader(data, 4)) is None
