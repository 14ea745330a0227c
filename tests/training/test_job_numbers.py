"""Job ids begin anew on every cluster: what a job finds in the folder of another one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from clusters import require_slurm
from processes import captured

from hydroslurm.core.jobid import JobId
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.jobs.control.requests import find_job, run_dir_of
from hydroslurm.slurm.client import open_client

LIFE = """
import os, sys
from hydroslurm.slurm import run_folders
if os.environ["LIFE"] == "looks":
    print("rank in", run_folders.from_environment(os.environ).root.name)
    sys.exit()
import torch, hydroslurm
model = torch.nn.Linear(1, 1)
run = hydroslurm.Run(model=model, every_s=0)
run.resume()
print(os.environ["LIFE"], "from", run.step, "in", run.dir.root.name)
run.step += 3
run.safe_point()
run.save()
run.close()
"""
"""Three steps on from where the run is, and a save; or a look at the folder. All lives have one
command line, as one training has."""

BATCH = """#!/bin/bash
#SBATCH --nodes=2 --requeue --open-mode=append --output=out.txt
export HYDROSLURM_GATE=hooks
attempt() { LIFE=$1 srun --nodes=1 --ntasks=1 "$PYTHON" attempt.py; }
LIFE=looks srun --ntasks=8 --overcommit "$PYTHON" attempt.py
if [ -z "$SLURM_RESTART_COUNT" ]; then
    attempt first; attempt second
    scontrol requeue "$SLURM_JOB_ID"
    sleep 300
fi
attempt requeued
"""


AGAIN = """#!/bin/bash
#SBATCH --nodes=2 --output=out.txt
LIFE=again srun --nodes=1 --ntasks=1 "$PYTHON" attempt.py
"""


def _job_one(folder: Path) -> tuple[int, list[str]]:
    """The first job of a new cluster, submitted in the folder: its status, what its ranks say, and
    the folder that is found for it."""
    (folder / "out.txt").unlink(missing_ok=True)
    with DevCluster.up(ClusterSpec(nodes=2, profile="requeue", kill_wait_s=5)) as cluster:
        environ = {**cluster.child_environ(), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        done = captured(
            ["sbatch", "--parsable", "--wait", "job.sbatch"], cwd=folder, env=environ, timeout=400
        )
        said = (folder / "out.txt").read_text()
        assert done.stdout.strip() == "1", done.stderr
        found = run_dir_of(find_job(open_client(environ=environ), JobId(1)))
        return done.returncode, [*said.splitlines(), f"found {found.root}"]


def test_a_job_never_goes_on_from_another_one_of_its_number(tmp_path: Path) -> None:
    """Job 1 of a second cluster, in the folder where job 1 of the first one has run, is refused
    with the remedy. Within the job all ranks, its later job steps and its restart continue in one
    folder, and who looks for the job's folder finds that one."""
    require_slurm()
    (tmp_path / "attempt.py").write_text(LIFE)
    (tmp_path / "job.sbatch").write_text(BATCH)
    code, said = _job_one(tmp_path)
    assert code == 0, "\n".join(said)
    for attempt, step in (("first", 0), ("second", 3), ("requeued", 6)):
        assert said.count(f"{attempt} from {step} in 1") == 1, "\n".join(said)
    assert said.count("rank in 1") == 16, "\n".join(said)
    assert said[-1] == f"found {tmp_path}/hydroslurm-runs/1"
    owner = json.loads((tmp_path / "hydroslurm-runs" / "1" / "job.json").read_text())
    assert (owner["cluster"], owner["job_name"]) == ("hydroslurm-dev", "job.sbatch")

    (tmp_path / "job.sbatch").write_text(AGAIN)
    code, said = _job_one(tmp_path)
    assert code != 0
    assert any("RunFolderError" in line and "another job 1 (job.sbatch)" in line for line in said)
    assert not any("from" in line.split() for line in said), "\n".join(said)
    assert not Path(said[-1].removeprefix("found ")).exists()
    assert [path.name for path in (tmp_path / "hydroslurm-runs").iterdir()] == ["1"]
