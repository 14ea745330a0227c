"""Job ids begin anew on every cluster: what a job finds in the folder of another one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.devcluster.pytest_plugin import require_slurm
from hydroslurm.jobs.control.requests import find_job, run_dir_of
from hydroslurm.slurm import run_folders
from hydroslurm.slurm.client import open_client

LIFE = """
import sys, torch, hydroslurm
model = torch.nn.Linear(1, 1)
run = hydroslurm.Run(model=model, every_s=0)
run.resume()
print(sys.argv[1], "from", run.step, "in", run.dir.root.name)
run.step += 3
run.safe_point()
run.save()
run.close()
"""
"""Three steps on from where the run is, and a save."""

FOLDER = """
import os
from hydroslurm.slurm import run_folders
print("rank in", run_folders.from_environment(os.environ).root.name)
"""

BATCH = """#!/bin/bash
#SBATCH --nodes=2 --requeue --open-mode=append --output=out.txt
export HYDROSLURM_GATE=hooks
attempt() { srun --nodes=1 --ntasks=1 "$PYTHON" attempt.py "$1"; }
srun --ntasks=8 --overcommit "$PYTHON" folder.py
if [ -z "$SLURM_RESTART_COUNT" ]; then
    attempt first; attempt second
    scontrol requeue "$SLURM_JOB_ID"
    sleep 300
fi
attempt requeued
"""


def _job_one(folder: Path) -> list[str]:
    """The first job of a new cluster, submitted in the folder; what its ranks say."""
    (folder / "out.txt").unlink(missing_ok=True)
    with DevCluster.up(ClusterSpec(nodes=2, profile="requeue", kill_wait_s=5)) as cluster:
        environ = {**cluster.child_environ(), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            ["sbatch", "--parsable", "--wait", "job.sbatch"],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        said = (folder / "out.txt").read_text()
        assert done.returncode == 0, said + done.stderr
        assert done.stdout.strip() == "1"
        found = run_dir_of(find_job(open_client(environ=environ), 1))
        assert run_folders.read_owner(found) is not None
        return [*said.splitlines(), f"found {found.root.name}"]


@pytest.mark.slow
def test_a_job_never_goes_on_from_another_one_of_its_number(tmp_path: Path) -> None:
    """Job 1 of a second cluster, in the folder where job 1 of the first one has run, begins anew in
    a folder of its own and says so once. Within each job all ranks, its later job steps and
    its restart go on in one folder, and who looks for the job's folder finds that one."""
    require_slurm()
    (tmp_path / "attempt.py").write_text(LIFE)
    (tmp_path / "folder.py").write_text(FOLDER)
    (tmp_path / "job.sbatch").write_text(BATCH)
    for name in ("1", "1-2"):
        said = _job_one(tmp_path)
        for attempt, step in (("first", 0), ("second", 3), ("requeued", 6)):
            assert said.count(f"{attempt} from {step} in {name}") == 1, "\n".join(said)
        assert said.count(f"rank in {name}") == 16, "\n".join(said)
        assert said[-1] == f"found {name}"
        told = [line for line in said if "is not used" in line]
        assert len(told) == (name == "1-2"), "\n".join(said)
    assert "another job 1 (job.sbatch) has begun at" in told[0]
    assert f"run folder is {tmp_path}/hydroslurm-runs/1-2" in told[0]
    names = [path.name for path in (tmp_path / "hydroslurm-runs").iterdir()]
    assert sorted(names) == ["1", "1-2"]
    first = (tmp_path / "hydroslurm-runs" / "1" / "job.jsonl").read_text().splitlines()
    assert json.loads(first[0])["cluster"] == "hydroslurm-dev"
