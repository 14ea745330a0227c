"""The recipe of docs/own-loop.md on a real Slurm: srun starts a torchrun on each node."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from integration.scripts.with_diff import changed
from integrations.stockjobs import SCRIPTS, TORCHRUN, StockJob

from hydroslurm.devcluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

ITERATIONS = 25


def submitted(cluster: DevCluster, folder: Path, *, pause_s: float) -> StockJob:
    """The script with a ``get_batch()``, changed as the page has it, on two nodes."""
    script = folder.with_suffix(".py")
    script.write_text(changed((SCRIPTS / "get_batch.py").read_text(), "own-loop.md"))
    given = (f"max_iters={ITERATIONS}", f"pause_s={pause_s}")
    job = StockJob(cluster, folder, str(script), *given, srun=TORCHRUN)
    return job.submit("--nodes=2", "--ntasks-per-node=1")


def losses(job: StockJob) -> list[tuple[str, str]]:
    """Each iteration and its loss, in the order of the job's output."""
    return re.findall(r"^iter (\d+): loss (\S+)$", job.output(), flags=re.M)


def test_it_is_requeued_and_goes_on(requeue_cluster: DevCluster, tmp_path: Path) -> None:
    """An operator's requeue, and a SIGTERM to the rank of the second node alone: each iteration
    once, with the loss of an undisturbed run."""
    alone = submitted(requeue_cluster, tmp_path / "alone", pause_s=0.0)
    assert alone.wait_for_end() == "COMPLETED", alone.output()
    job = submitted(requeue_cluster, tmp_path / "stopped", pause_s=0.5)
    job.wait_for(lambda: len(losses(job)) >= 3)
    job.slurm("scontrol", "requeue", job.job_id)
    job.wait_for(lambda: "attempt 2 resumes" in job.output())
    seen = len(losses(job))
    job.wait_for(lambda: len(losses(job)) >= seen + 3)
    os.kill(job.pid_of(1, attempt=2), signal.SIGTERM)
    assert job.wait_for_end() == "COMPLETED", job.output()
    assert "attempt 3 resumes" in job.output()
    assert losses(job) == losses(alone)
    assert len(losses(job)) == ITERATIONS + 1
