"""A rank that fails fails the job: a real Slurm ends the other ranks with the SIGTERM that a
preemption has, and nobody may take it for one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import wait_until
from sbatchfiles import multi_node_script
from training.trainings import Training

from hydroslurm.devcluster import DevCluster
from hydroslurm.slurm.client import JobState, open_client

pytestmark = pytest.mark.slurm

# one rank fails at its third step; the other trains on until the SIGTERM
TRAINING = """
import os, time
import torch
import hydroslurm
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hydroslurm.Run(model=model, optimizer=optimizer) as run:
    run.resume()
    while True:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        run.step += 1
        run.safe_point()
        if os.environ["SLURM_PROCID"] == "1" and run.step == 3:
            raise RuntimeError("a bug at step 3")
        time.sleep(0.02)
"""


def test_a_failed_rank_is_no_preemption(requeue_cluster: DevCluster, tmp_path: Path) -> None:
    """The job ends as failed, in its first attempt: it would be requeued, and fail again, for
    ever."""
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "job.sh").write_text(multi_node_script("python3 -u train.py", nodes=2))
    job = Training(requeue_cluster, tmp_path, 0, environ={"MASTER_ADDR": "127.0.0.1"})
    job_id = int(job.slurm("sbatch", "--parsable", "--output=out", "job.sh"))
    client = open_client("commands", environ=requeue_cluster.child_environ())
    out = tmp_path / "out"

    def over() -> bool:
        seen = client.job(job_id)
        assert seen.restart_count == 0, out.read_text()
        return seen.state.has_ended

    try:
        wait_until(over, "the end of the job", limit_s=60)
        assert client.job(job_id).state is JobState.FAILED
        told = re.sub(r"\s+", " ", out.read_text())
        assert "the job is not requeued for that" in told, told
    finally:
        client.cancel(client.job(job_id))
