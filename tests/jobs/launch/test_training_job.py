"""What is left of a submission that fails halfway."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from hydroslurm.errors import MaybeSubmitted, RunFolderError, SlurmMissing
from hydroslurm.jobs.launch import training_job
from hydroslurm.jobs.launch.executor import Executor
from hydroslurm.jobs.launch.training_job import submit_job
from hydroslurm.jobs.spec.reading import loads

SPEC = "replicaSpecs: [{template: {command: [python, train.py]}}]"
SBATCH = """#!/bin/sh
# Fake sbatch: takes every job, and ends with a status all the same; nothing can be written about
# the first one any more.
cd "$RUNS"/*training*
env >> "$RUNS/environ"
rm submission.json conditions.jsonl
mkdir submission.json conditions.jsonl
echo "Submitted batch job 41"
exit 3
"""


def test_a_job_that_cannot_be_recorded_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has it: an error would make people submit it again. It inherits nothing that says which
    task, element or restart of another job has submitted it."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    inherited = ("SBATCH_WAIT", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    for name in inherited:
        monkeypatch.setenv(name, "1")
    job = submit_job(loads(SPEC), folder=tmp_path / "runs", environ=os.environ)
    assert job.job_id == 41
    assert any("Slurm has job 41, but its run folder does not say so" in one for one in job.notes)
    environ = (tmp_path / "runs" / "environ").read_text()
    assert "RUNS=" in environ
    assert not any(f"{name}=" in environ for name in inherited)


def test_without_slurm_no_run_folder_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold the environment of the spec."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmMissing):
        submit_job(loads(SPEC), folder=tmp_path / "runs", environ=os.environ)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("how", ["a checkpoint folder that cannot be made", "a full disk"])
def test_what_fails_before_sbatch_leaves_no_folder(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was submitted."""
    (tmp_path / "file").touch()
    spec = SPEC
    if how == "a full disk":
        monkeypatch.setattr(training_job, "job_script", raising(RunFolderError("no space left")))
    else:
        spec += f"\npreemption: {{checkpointDirectory: {tmp_path}/file/below}}"
    with pytest.raises(RunFolderError):
        submit_job(loads(spec), folder=tmp_path / "runs", environ=os.environ)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("fails", ["sbatch", "the record"])
def test_a_job_of_submitit_that_slurm_has_is_named(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails after sbatch has taken it: the run folder stays, and the id is said."""
    for name, script in (
        ("sbatch", f'echo "Submitted batch job 41"; exit {3 * (fails == "sbatch")}'),
        ("srun", ""),
        ("squeue", 'echo "squeue: error" >&2; exit 1'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    executor = Executor(tmp_path / "runs")
    if fails == "sbatch":
        with pytest.raises(MaybeSubmitted, match="Slurm has the job, as 41"):
            executor.submit(print, "x")
    else:
        monkeypatch.setattr(Executor, "_lead_to", raising(OSError("no space left")))
        with pytest.warns(RuntimeWarning, match="Slurm has job 41"):
            assert executor.submit(print, "x").job_id == "41"
    (run,) = (tmp_path / "runs").glob("*-print-*")
    assert (run / "submission.json").exists()


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail
