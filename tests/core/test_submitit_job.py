"""Whether a job is one of submitit's, or one that such a job has submitted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from submitit.core.utils import JobPaths

from hydroslurm.core.submitit_job import executor_of

MAIN = ("python", "-u", "-m", "submitit.core._submit", "/logs")


def test_a_job_of_its_slurm_executor(tmp_path: Path) -> None:
    """It has what submitit has put there for it; a job that inherits its variables has not."""
    for folder, job_id in ((tmp_path, "12"), (tmp_path / "%j", "12"), (tmp_path / "%A/%a", "7_3")):
        paths = JobPaths(folder, job_id)
        paths.folder.mkdir(parents=True, exist_ok=True)
        paths.submitted_pickle.touch()
        found = {"SUBMITIT_EXECUTOR": "slurm", "SUBMITIT_FOLDER": str(folder)}
        array, _, task = job_id.partition("_")
        job = {**found, "SLURM_JOB_ID": job_id}
        if task:
            job |= {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task}
        assert executor_of(job) == "slurm"
        inner = {**found, "SLURM_JOB_ID": "13"}
        assert executor_of(inner) == ""
        assert executor_of(inner, program=MAIN) == "slurm"  # it is one itself, and begins
    assert executor_of({"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "12"}) == "slurm"
    assert executor_of({"SUBMITIT_FOLDER": str(tmp_path), "SLURM_JOB_ID": "12"}) == ""


def test_a_job_of_its_local_executor() -> None:
    """It is below the process that watches it."""
    code = "import os; from hydroslurm.core.submitit_job import *; print([executor_of(os.environ)])"
    with subprocess.Popen(["sleep", "100"]) as other:
        for watcher, seen in ((os.getpid(), "['local']"), (other.pid, "['']")):
            environ = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": str(watcher)}
            done = subprocess.run(
                [sys.executable, "-c", code], env={**os.environ, **environ},
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            assert done.stdout.strip() == seen
        other.kill()
