"""Unchanged scripts of frameworks on a real Slurm, and the recipe of docs/own-loop.md, where srun
starts a torchrun on each node: requeued and signalled."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from integration.scripts.with_diff import changed
from integrations.stockjobs import SCRIPTS, TORCHRUN, StockJob, steps_of_attempt

from hydroslurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
LOSS = r"^iter (\d+): loss (\S+)$"


def stopped_twice(job: StockJob, rank: int) -> None:
    """By an operator's requeue, and by a SIGTERM to one rank in its second attempt, each behind
    three steps."""
    job.wait_for(lambda: steps_of_attempt(job.output(), 1) >= 3)
    job.slurm("scontrol", "requeue", job.job_id)
    job.wait_for(lambda: steps_of_attempt(job.output(), 2) >= 3)
    os.kill(job.pid_of(rank, attempt=2), signal.SIGTERM)
    assert job.wait_for_end() == "COMPLETED", job.output()
    assert "attempt 3 resumes from step" in job.output()


def require_same(job: StockJob, alone: StockJob, *names: str) -> None:
    assert alone.wait_for_end() == "COMPLETED", alone.output()
    for name in names:
        assert (job.folder / name).read_bytes() == (alone.folder / name).read_bytes()


def test_lightning(requeue_cluster: DevCluster, tmp_path: Path) -> None:
    """Two ranks on two nodes, requeued by an operator: the same weights, and the same rows in one
    log."""
    given = ("lightning_digits.py", "--nodes=2", "--epochs=2", "--workers=0")
    alone = StockJob(requeue_cluster, tmp_path / "alone", *given).submit(*TWO_NODES)
    job = StockJob(requeue_cluster, tmp_path / "job", *given, "--pause-s=0.03").submit(*TWO_NODES)
    job.wait_for(lambda: steps_of_attempt(job.output(), 1) >= 3)
    job.slurm("scontrol", "requeue", job.job_id)
    assert job.wait_for_end() == "COMPLETED", job.output()
    assert "attempt 2 resumes from step" in job.output()
    assert "stand down in this fit" in job.output()
    require_same(job, alone, "final.pt", "logs/lightning_logs/version_0/metrics.csv")


@pytest.mark.long
def test_transformers(requeue_cluster: DevCluster, tmp_path: Path) -> None:
    """The same losses and weights."""
    given = ("hf_causal_lm.py", "output", "--workers=2", "--epochs=2")
    alone = StockJob(requeue_cluster, tmp_path / "alone", *given).submit("--ntasks=1")
    job = StockJob(requeue_cluster, tmp_path / "job", *given, "--jit", "--pause-s=0.3")
    stopped_twice(job.submit("--ntasks=1"), rank=0)
    assert "enable_jit_checkpoint of transformers stands down" in job.output()
    require_same(job, alone, "output/result.txt")


@pytest.mark.long
def test_torchrun(requeue_cluster: DevCluster, tmp_path: Path) -> None:
    """The script with a ``get_batch()``, changed as the page has it, on two nodes: each iteration
    once, with the loss of an undisturbed run."""
    script = tmp_path / "train.py"
    script.write_text(changed((SCRIPTS / "get_batch.py").read_text(), "own-loop.md"))
    alone, job = (
        StockJob(
            requeue_cluster, tmp_path / name, str(script), "max_iters=25", f"pause_s={pause_s}",
            srun=TORCHRUN,
        ).submit(*TWO_NODES)
        for name, pause_s in (("alone", 0.0), ("job", 0.5))
    )  # fmt: skip
    stopped_twice(job, rank=1)
    require_same(job, alone)
    losses = re.findall(LOSS, job.output(), flags=re.M)
    assert losses == re.findall(LOSS, alone.output(), flags=re.M)
    assert len(losses) == 26
