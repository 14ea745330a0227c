"""A job with several trainings, on a real Slurm."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from processes import text_of, wait_until
from training.trainings import Training

from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm

SCRIPT = Path(__file__).with_name("one_of_several.py")
LIMIT_S = 400.0
JOB = f"""#!/bin/bash
train="{sys.executable} -u {SCRIPT}"
step="srun --exact -n1 --open-mode=append"
$step -o pretrain $train pretrain --steps 3
for i in 1 2; do $step -o loop $train loop --steps 2; done
slow() {{ $step -o slow $train slow --lr 2 --steps 6 --step-s 1 --until go; }}
fast() {{ $step -o fast $train fast --steps 30 --step-s 0.02 --until go; }}
first=fast second=slow
[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || {{ first=slow second=fast; touch go; }}
$first & until grep -q began $first; do sleep 0.1; done
$second & wait
printf '0 %s\\n1 %s\\n' "$train program --steps 4" "$train program --steps 5" > programs
HYDROSLURM_ALONE=1 srun -n2 --open-mode=append -o program%t --multi-prog programs
$train multirun --runs 2 --steps 3 >> multirun 2>&1
"""


def test_each_training_of_a_job_resumes_its_own(
    requeue_cluster: DevCluster, tmp_path: Path
) -> None:
    """Job steps one after the other, a line in a loop, side by side and in another order after a
    requeue, several programs in a step, several runs in a process: none takes another's state, and
    the requeue waits for the one that is slower to save."""
    (tmp_path / "job.sh").write_text(JOB)

    slurm = Training(requeue_cluster, tmp_path, 0).slurm

    log = lambda name: text_of(tmp_path / name)  # noqa: E731

    options = ("--parsable", "-N1", "-n2", "--requeue", "--open-mode=append", "-o", "batch")
    job_id = slurm("sbatch", *options, "job.sh")
    try:
        begun = lambda: "step 1\n" in log("slow") and "step 2\n" in log("fast")  # noqa: E731
        wait_until(begun, f"{log('batch')} {log('fast')}", limit_s=LIMIT_S)
        said = slurm(sys.executable, "-m", "hydroslurm.cli", "requeue", job_id)
        assert "requeued" in said, said
        ended = lambda: "multirun 1 ends" in log("multirun")  # noqa: E731
        wait_until(ended, f"{log('batch')} {log('slow')}", limit_s=LIMIT_S)
        wait_until(lambda: not slurm("squeue", "-h", "-j", job_id), "its end", limit_s=LIMIT_S)
    finally:
        slurm("scancel", job_id)
    everything = "".join(
        map(log, ("pretrain", "loop", "fast", "slow", "program0", "program1", "multirun", "batch"))
    )
    ends = re.findall(r"^(\w+ \d) ends at (\d+)$", everything, re.MULTILINE)
    wanted = (
        "fast 0 30, loop 0 2, loop 0 2, multirun 0 3, multirun 1 6, pretrain 0 3, program 0 4, "
    )
    wanted += "program 0 5, slow 0 12"
    assert sorted(map(" ".join, ends)) == wanted.split(", "), everything
    for name in ("fast", "slow"):
        first, second = re.findall(rf"{name} 0 began at (\d+)", log(name))
        assert first == "0" < second, log(name)
    base = RunDir(tmp_path / "hydroslurm-runs" / job_id)
    assert all(base.numbered(number).finished_json.exists() for number in range(1, 9)), everything
    assert (base.numbered(8).root / "fit-2" / "finished.json").exists()
