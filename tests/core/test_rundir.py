"""Paths of a run folder, and finding it from a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydroslurm.core import rundir
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError


def test_a_folder_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    """The error names the folder and the way out."""
    (tmp_path / "x").write_text("")
    with pytest.raises(RunFolderError, match=r"Name one .* --folder"):
        RunDir(tmp_path / "x" / "run").create()


def test_a_job_leads_to_its_run_folder(tmp_path: Path) -> None:
    """The comment names it, with spaces too; without one it is below the working directory."""
    run = RunDir(tmp_path / "my runs" / "a")
    assert rundir.of_job(7, work_dir=tmp_path, comment=rundir.comment_for(run)) == run
    assert rundir.of_job(7, work_dir=tmp_path, comment="somebody's words") == RunDir(
        tmp_path / "hydroslurm-runs" / "7"
    )


def test_a_rank_finds_its_run_folder() -> None:
    """HYDROSLURM_RUN_DIR wins over the job's default; outside of both there is none."""
    job = {"SLURM_JOB_ID": "12", "SLURM_SUBMIT_DIR": "/home/me"}
    assert rundir.from_environment(job) == RunDir(Path("/home/me/hydroslurm-runs/12"))
    assert rundir.from_environment({**job, "HYDROSLURM_RUN_DIR": "/r"}) == RunDir(Path("/r"))
    assert rundir.from_environment({}) is None


def test_a_job_does_not_inherit_a_run_folder() -> None:
    """One that a job submits has its own, unless somebody names one for it."""
    job = {"SLURM_JOB_ID": "12", "SLURM_SUBMIT_DIR": "/home/me"}
    named = {**job, **rundir.variables_of(Path("/r"), job)}
    assert rundir.from_environment(named) == RunDir(Path("/r"))
    inner = {**named, "SLURM_JOB_ID": "13"}
    assert rundir.from_environment(inner) == RunDir(Path("/home/me/hydroslurm-runs/13"))
    assert rundir.from_environment({**inner, "HYDROSLURM_RUN_DIR": "/s"}) == RunDir(Path("/s"))
    without = {name: value for name, value in named.items() if not name.startswith("SLURM")}
    assert rundir.from_environment(without) == RunDir(Path("/r"))
