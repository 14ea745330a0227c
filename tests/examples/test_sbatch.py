"""sbatch/pause.sbatch and sbatch/partitions.conf on a real Slurm."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_until

from hydroslurm.devcluster import DevCluster
from hydroslurm.report.history import read_history
from hydroslurm.rundir import RunDir

pytestmark = pytest.mark.slurm


def slurm(cluster: DevCluster, *command: str, cwd: Path) -> str:
    done = subprocess.run(
        command,
        env={**cluster.child_environ(), "PYTHON": sys.executable},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout.strip()


def test_batch_job_is_parked_for_an_urgent_one(
    pause_cluster: DevCluster, root: Path, tmp_path: Path
) -> None:
    """The script runs unchanged; an urgent job parks it, and it goes on to its accuracy."""
    (tmp_path / "examples").symlink_to(root / "examples")
    script = str(root / "sbatch" / "pause.sbatch")
    options = ("--iterations", "800", "--log-every", "10")
    job = slurm(pause_cluster, "sbatch", "--parsable", script, *options, cwd=tmp_path)
    log = tmp_path / f"pausable-{job}.out"
    wait_until(lambda: log.exists() and "\nstep" in log.read_text(), "the first steps")

    node = slurm(pause_cluster, "squeue", "-h", "-j", job, "-o", "%N", cwd=tmp_path)
    urgent = ("srun", "--partition=urgent", "--exclusive", f"--nodelist={node}", "true")
    slurm(pause_cluster, *urgent, cwd=tmp_path)

    wait_until(lambda: "sha256" in log.read_text(), "the end of the training")
    assert re.search(r"accuracy 9\d\.\d+%", log.read_text())
    run_dir = RunDir(tmp_path / "hydroslurm-runs" / job)
    wait_until(lambda: read_history(run_dir.root).lives[0].ended, "the last event")
    (pause,) = read_history(run_dir.root).pauses
    assert pause.complete
    assert (pause.causes, pause.signal) == (("slurm",), "SIGTSTP")


def test_requeue_snippet_is_what_the_cluster_runs_with(
    requeue_cluster: DevCluster, root: Path, tmp_path: Path
) -> None:
    """Every setting of the requeue snippet is one that is in force where requeues are tested."""
    snippet = (root / "sbatch" / "partitions-requeue.conf").read_text()
    config = slurm(requeue_cluster, "scontrol", "show", "config", cwd=tmp_path)
    for name in ("PreemptType", "PreemptMode", "JobRequeue"):
        (wanted,) = re.findall(rf"^{name}=(\S+)", snippet, flags=re.MULTILINE)
        (seen,) = re.findall(rf"^{name}\s*= (\S+)", config, flags=re.MULTILINE)
        assert seen == wanted, name
    for name in ("low", "urgent"):
        (line,) = re.findall(rf"^PartitionName={name} .*", snippet, flags=re.MULTILINE)
        shown = slurm(requeue_cluster, "scontrol", "-o", "show", "partition", name, cwd=tmp_path)
        seen_settings = dict(word.partition("=")[::2] for word in shown.split())
        for setting in ("PriorityTier", "PreemptMode"):
            (wanted,) = re.findall(rf"{setting}=(\S+)", line)
            assert seen_settings[setting] == wanted, (name, setting)


def test_snippet_is_what_the_cluster_runs_with(
    pause_cluster: DevCluster, root: Path, tmp_path: Path
) -> None:
    """Every preemption setting of the snippet is in force where the other test has seen it work."""
    snippet = (root / "sbatch" / "partitions.conf").read_text()
    config = slurm(pause_cluster, "scontrol", "show", "config", cwd=tmp_path)
    for name in ("PreemptType", "PreemptMode", "SelectType"):
        (wanted,) = re.findall(rf"^{name}=(\S+)", snippet, flags=re.MULTILINE)
        (seen,) = re.findall(rf"^{name}\s*= (\S+)", config, flags=re.MULTILINE)
        assert set(seen.split(",")) == set(wanted.split(",")), name
    for name in ("low", "urgent"):
        (line,) = re.findall(rf"^PartitionName={name} .*", snippet, flags=re.MULTILINE)
        shown = slurm(pause_cluster, "scontrol", "-o", "show", "partition", name, cwd=tmp_path)
        seen_settings = dict(word.partition("=")[::2] for word in shown.split())
        for setting in ("PriorityTier", "PreemptMode", "OverSubscribe"):
            (wanted,) = re.findall(rf"{setting}=(\S+)", line)
            assert seen_settings[setting] == wanted, (name, setting)
