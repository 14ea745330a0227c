"""An unchanged Lightning script on a real Slurm: two ranks on two nodes, requeued and signalled."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from integrations.stockjobs import StockJob

from hydroslurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm

METRICS = "logs/lightning_logs/version_0/metrics.csv"
TASKS = ("--nodes=2", "--ntasks-per-node=1")


def run(cluster: DevCluster, folder: Path) -> StockJob:
    arguments = ("--nodes=2", "--epochs=2", "--workers=0")
    return StockJob(cluster, folder, "lightning_digits.py", *arguments).submit(*TASKS)


def test_unchanged_script(requeue_cluster: DevCluster, tmp_path: Path) -> None:
    """The same weights, and the same rows in one log: after an operator's requeue, and after a
    SIGTERM to the rank that is not the first."""
    alone = run(requeue_cluster, tmp_path / "alone")
    assert alone.wait_for_end() == "COMPLETED", alone.output()
    job = run(requeue_cluster, tmp_path / "stopped")
    wait_for_attempt(job, 1)
    job.slurm("scontrol", "requeue", job.job_id)
    wait_for_attempt(job, 2)
    os.kill(job.pid_of(1, attempt=2), signal.SIGTERM)
    wait_for_attempt(job, 3)
    assert job.wait_for_end() == "COMPLETED", job.output()
    assert "stand down in this fit" in job.output()
    for name in ("final.pt", METRICS):
        assert (job.folder / name).read_bytes() == (alone.folder / name).read_bytes()


def wait_for_attempt(job: StockJob, number: int) -> None:
    """Its training has begun."""
    path = job.folder / "hydroslurm-runs" / job.job_id / "attempts.jsonl"
    job.wait_for(lambda: path.exists() and f'"attempt":{number}' in compact(path))
    job.wait_for(lambda: job.output().count("stand down in this fit") >= number)


def compact(path: Path) -> str:
    return path.read_text().replace(" ", "")
