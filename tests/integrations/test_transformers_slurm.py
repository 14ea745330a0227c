"""An unchanged script with Hugging Face's Trainer on a real Slurm: requeued and signalled."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from integrations.stockjobs import StockJob

from hydroslurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm


def run(cluster: DevCluster, folder: Path, *arguments: str) -> StockJob:
    given = ("output", "--workers=2", "--epochs=2", *arguments)
    return StockJob(cluster, folder, "hf_causal_lm.py", *given).submit("--ntasks=1")


def test_unchanged_script(requeue_cluster: DevCluster, tmp_path: Path) -> None:
    """The same losses and weights, after an operator's requeue and after a SIGTERM."""
    alone = run(requeue_cluster, tmp_path / "alone")
    assert alone.wait_for_end() == "COMPLETED", alone.output()
    job = run(requeue_cluster, tmp_path / "stopped", "--jit", "--pause-s=0.3")
    wait_for_steps(job, attempt=1)
    job.slurm("scontrol", "requeue", job.job_id)
    wait_for_steps(job, attempt=2)
    os.kill(job.pid_of(0, attempt=2), signal.SIGTERM)
    assert job.wait_for_end() == "COMPLETED", job.output()
    assert "attempt 3 resumes from step" in job.output()
    assert "enable_jit_checkpoint of transformers stands down" in job.output()
    result = "output/result.txt"
    assert (job.folder / result).read_bytes() == (alone.folder / result).read_bytes()


def wait_for_steps(job: StockJob, *, attempt: int) -> None:
    """Some steps were trained in this attempt."""
    begun = "a new run, step 0" if attempt == 1 else f"attempt {attempt} resumes from step"
    job.wait_for(lambda: job.output().partition(begun)[2].count("\nstep ") >= 3)
