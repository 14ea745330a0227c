"""sbatch/pause.sbatch and sbatch/torchrun.sbatch on a real Slurm."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from clusters import Part, preempt
from processes import captured, wait_until

from hydroslurm.core.events import read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import DevCluster
from hydroslurm.report.reading import read_history

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 180.0


def slurm(cluster: DevCluster, *command: str, cwd: Path) -> str:
    done = captured(command, cwd=cwd, env=cluster.child_environ(), timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout.strip()


def test_batch_job_is_parked_for_an_urgent_one(pause_cluster: DevCluster, tmp_path: Path) -> None:
    """The script runs unchanged; an urgent job parks it, and it goes on in its process, to the
    weights of one that was left alone, without hydroslurm. Nothing of ours is printed."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    options = ("--iterations", "800", "--log-every", "10")
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "hydroslurm.py").write_text("raise ImportError('hydroslurm was imported')")
    shutil.copy(ROOT / "examples/train.py", alone)
    script = str(ROOT / "sbatch" / "pause.sbatch")
    job = slurm(pause_cluster, "sbatch", "--parsable", script, *options, "--pausable", cwd=tmp_path)
    log = tmp_path / f"pausable-{job}.out"
    wait_until(lambda: log.exists() and "\nstep" in log.read_text(), "the first steps")

    node = slurm(pause_cluster, "squeue", "-h", "-j", job, "-o", "%N", cwd=tmp_path)
    preempt(pause_cluster, [node])

    left_alone = captured([sys.executable, "train.py", *options], cwd=alone, timeout=LIMIT_S)
    last = left_alone.stdout.splitlines()[-2:]
    assert re.fullmatch(r"accuracy 9\d\.\d+% on 360 test images", last[0]), left_alone.stderr
    wait_until(lambda: "sha256" in log.read_text(), "the end of the training")
    assert log.read_text().splitlines()[-2:] == last
    assert "hydroslurm" not in log.read_text()
    run_dir = RunDir(tmp_path / "hydroslurm-runs" / job)
    wait_until(lambda: read_history(run_dir.root).attempts[0].ended, "the last event")
    (pause,) = read_history(run_dir.root).pauses
    assert pause.complete
    assert (pause.causes, pause.signal) == (("slurm",), "SIGTSTP")
    assert len({event.pid for event in read_events(run_dir.rank_events(0))}) == 1


def test_torchruns_ranks_save_for_an_urgent_job_and_go_on(
    requeue_cluster: Part, tmp_path: Path
) -> None:
    """The script runs unchanged; below the agents the ranks save, the job is requeued, and its next
    attempt goes on behind the step that was saved, to the end."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = str(ROOT / "sbatch" / "torchrun.sbatch")
    here = "--export=ALL,RANKS_PER_NODE=1"
    options = ("--epochs", "20", "--log-every", "10")
    job = slurm(requeue_cluster, "sbatch", "--parsable", here, script, *options, cwd=tmp_path)
    log = tmp_path / f"torchrun-{job}.out"
    wait_until(lambda: log.exists() and " step 10 " in log.read_text(), "steps", limit_s=LIMIT_S)
    preempt(requeue_cluster, requeue_cluster.nodes)
    wait_until(lambda: "sha256" in log.read_text(), "the end of the training", limit_s=LIMIT_S)
    assert f"job {job} is requeued and resumes later" in log.read_text()
    went_on = re.search(r"attempt 2 resumes from step (\d+)", log.read_text())
    assert went_on is not None
    assert int(went_on[1]) >= 10
    left = "leaves with status 0"
    wait_until(lambda: log.read_text().count(left) == 2, "the agents", limit_s=LIMIT_S)
