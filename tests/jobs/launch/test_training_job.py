"""What is left of a submission that fails halfway."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hydroslurm.errors import SlurmMissing
from hydroslurm.jobs.launch.training_job import submit_job
from hydroslurm.jobs.spec.reading import loads

SPEC = "replicaSpecs: [{template: {command: [python, train.py]}}]"
SBATCH = """#!/bin/sh
# Fake sbatch: takes every job; nothing can be written about the first one any more.
cd "$RUNS"/*training*
rm submission.json conditions.jsonl
mkdir submission.json conditions.jsonl
echo "Submitted batch job 41"
"""


def test_a_job_that_cannot_be_recorded_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has it: an error would make people submit it again."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    job = submit_job(loads(SPEC), folder=tmp_path / "runs", environ=os.environ)
    assert job.job_id == 41
    assert any("Slurm has job 41, but its run folder does not say so" in one for one in job.notes)


def test_without_slurm_no_run_folder_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold the environment of the spec."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmMissing):
        submit_job(loads(SPEC), folder=tmp_path / "runs", environ=os.environ)
    assert not (tmp_path / "runs").exists()
