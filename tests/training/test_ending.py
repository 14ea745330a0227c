"""What follows a run in its script runs until it has come to its end once."""

from __future__ import annotations

import signal
from pathlib import Path

import zygote

from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.rundir import RunDir
from hydroslurm.training.attempts import AttemptLog

PROGRAM = Path(__file__).with_name("ends_of_a_run.py")


def attempt(folder: Path, how: str) -> tuple[int, str]:
    """The exit status, and what was said."""
    done = zygote.ran([PROGRAM, folder, how])
    return done.returncode, done.stdout + done.stderr


def test_what_follows_the_training_is_done_until_its_process_ends_well(tmp_path: Path) -> None:
    """Behind the block a signal, an error and a status end it: each time the next start trains
    nothing, has the last state, and goes on behind the block. Then it ends well, and the next one
    leaves at once."""
    run = RunDir(tmp_path / "first")
    code, said = attempt(tmp_path, "signal")
    assert (code, said.count("trained 3")) == (-signal.SIGTERM, 1), said
    weight = next(line for line in said.splitlines() if line.startswith("weight"))
    for how, wanted in (("error", 1), ("status", 3), ("well", 0)):
        assert not run.finished_json.exists()
        code, said = attempt(tmp_path, how)
        assert (code, "behind" in said, "trained" in said) == (wanted, True, False), said
        assert weight in said, said
        assert ("repeats what follows the training" in said) == (code != 0)
    assert run.finished_json.exists()
    code, said = attempt(tmp_path, "error")
    assert (code, "behind" in said) == (0, False)
    assert "has finished at step 3; nothing to do" in said
    assert [attempt.step for attempt in AttemptLog(run.attempts_jsonl).attempts()] == [0, 3, 3, 3]


def test_the_end_of_a_child_is_that_of_its_run(tmp_path: Path) -> None:
    """Where multiprocessing has started it, as torch's spawn() does."""
    for how, code in (("child, error", 1), ("child, well", 0)):
        assert not RunDir(tmp_path / "first").finished_json.exists()
        assert attempt(tmp_path, how)[0] == code
    assert RunDir(tmp_path / "first").finished_json.exists()


def test_two_runs_in_sequence(tmp_path: Path) -> None:
    """In one folder: an error at the second, with the fix. In two: a restart in the second goes on
    there, and both have finished when their process has ended well."""
    code, said = attempt(tmp_path / "one", "two in one folder")
    assert code == 1
    assert "UsageError: this process has already finished a Run in" in said
    assert 'Run(directory="' in said
    assert not RunDir(tmp_path / "one" / "first").finished_json.exists()
    runs = [RunDir(tmp_path / "two" / name) for name in ("first", "second")]
    assert attempt(tmp_path / "two", "stopped in the second")[0] == RUN_AGAIN
    assert not any(run.finished_json.exists() for run in runs)
    code, said = attempt(tmp_path / "two", "two folders")
    assert (code, said.count("behind"), said.count("trained 3")) == (0, 1, 1), said
    assert all(run.finished_json.exists() for run in runs)
