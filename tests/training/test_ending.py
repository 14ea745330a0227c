"""What follows a run in its script runs until it has come to its end once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from zygote import forked

from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.rundir import RunDir
from hydroslurm.training.attempts import AttemptLog

PROGRAM = Path(__file__).with_name("ends_of_a_run.py")
Attempt = Callable[[str], tuple[int, list[str]]]


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Attempt]]:
    """Makes what makes attempts in a folder: the exit status, and what was said."""
    path = os.pathsep.join([str(PROGRAM.parents[1]), os.environ["PYTHONPATH"]])
    folder, environ = tmp_path_factory.mktemp("forker"), {"PYTHONPATH": path}
    with forked(PROGRAM.read_text(), folder, environ=environ) as forker:
        forker.expect("ready")

        def in_folder(folder: Path) -> Attempt:
            def attempt(how: str) -> tuple[int, list[str]]:
                seen = len(forker.lines)
                forker.say(f"{folder}\t{how}")
                code = int(forker.expect("ended"))
                return code, forker.lines[seen:]

            return attempt

        yield in_folder


def test_what_follows_the_training_is_done_until_its_process_ends_well(
    attempts: Callable[[Path], Attempt], tmp_path: Path
) -> None:
    """Behind the block a signal, an error and a status end it: each time the next start trains
    nothing, has the last state, and goes on behind the block. Then it ends well, and the next one
    leaves at once."""
    attempt, run = attempts(tmp_path), RunDir(tmp_path / "first")
    code, said = attempt("signal")
    assert (code, said.count("trained 3")) == (-signal.SIGTERM, 1)
    weight = next(line for line in said if line.startswith("weight"))
    for how, wanted in (("error", 1), ("status", 3), ("well", 0)):
        assert not run.finished_json.exists()
        code, said = attempt(how)
        assert (code, "behind" in said) == (wanted, True), said
        assert weight in said, said
        assert not [line for line in said if line.startswith("trained")], said
        assert any("repeats what follows the training" in line for line in said) == (code != 0)
    assert run.finished_json.exists()
    code, said = attempt("error")
    assert (code, "behind" in said) == (0, False)
    assert "has finished at step 3; nothing to do" in "\n".join(said)
    assert [attempt.step for attempt in AttemptLog(run.attempts_jsonl).attempts()] == [0, 3, 3, 3]


def test_the_end_of_a_child_is_that_of_its_run(
    attempts: Callable[[Path], Attempt], tmp_path: Path
) -> None:
    """Where multiprocessing has started it, as torch's spawn() does."""
    attempt, run = attempts(tmp_path), RunDir(tmp_path / "first")
    assert attempt("child, error")[0] == 1
    assert not run.finished_json.exists()
    assert attempt("child, well")[0] == 0
    assert run.finished_json.exists()


def test_two_runs_in_sequence(attempts: Callable[[Path], Attempt], tmp_path: Path) -> None:
    """In one folder: an error at the second, with the fix. In two: a restart in the second goes on
    there, and both have finished when their process has ended well."""
    code, said = attempts(tmp_path / "one")("two in one folder")
    assert code == 1
    words = "\n".join(said)
    assert "UsageError: this process has already finished a Run in" in words
    assert 'Run(directory="' in words
    assert not RunDir(tmp_path / "one" / "first").finished_json.exists()
    attempt = attempts(tmp_path / "two")
    runs = [RunDir(tmp_path / "two" / name) for name in ("first", "second")]
    assert attempt("stopped in the second")[0] == RUN_AGAIN
    assert not any(run.finished_json.exists() for run in runs)
    code, said = attempt("two folders")
    assert (code, said.count("behind"), said.count("trained 3")) == (0, 1, 1), said
    assert all(run.finished_json.exists() for run in runs)
