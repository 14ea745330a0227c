"""Jobs without a spec on a real Slurm: HFAI's two calls through a preemption, what a script that
saves nothing is told, and describe, list, logs, attach and cancel of both."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zygote
from clusters import Part, preempt
from integration.trainingjob.scene import LIMIT_S, Scene, matches
from training.trainings import RECORDED

pytestmark = pytest.mark.slurm

TWO_CALLS = RECORDED / "train_two_calls.py"
OPTIONS = ("--epochs", "3", "--batch-size", "16", "--log-every", "10")
SAVES_NOTHING = """\
import time
import torch

optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
while True:
    optimizer.step()
    time.sleep(0.1)
"""
TOLD = "hydroslurm: a preemption stops this job and requeues it (PreemptMode=REQUEUE of partition"


@pytest.fixture(scope="module")
def stage(
    requeue_cluster: Part, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Scene]]:
    """Two jobs that have begun: the first through `hydroslurm submit`, to be preempted on a node of
    its own; the second, of two ranks, with `srun --preempt` in a batch script."""
    base, (first, second) = tmp_path_factory.mktemp("plain"), requeue_cluster.nodes
    saves, loses = Scene(requeue_cluster, base / "saves"), Scene(requeue_cluster, base / "loses")
    for scene in (saves, loses):
        scene.folder.mkdir()
    words = ("submit", "--partition=low", f"--sbatch=nodelist={first}", str(TWO_CALLS), *OPTIONS)
    done = saves.hydroslurm(*words, "--think-s=0.1", "--out=out.json")
    assert done.returncode == 0, done.stderr
    saves.job_id = int(done.stdout.split()[1])
    (loses.folder / "loses.py").write_text(SAVES_NOTHING)
    srun = f"srun --preempt {sys.executable} loses.py"
    batch = ("--partition=low", f"--nodelist={second}", "--ntasks=2", "--output=%j-%x.txt")
    sbatch = ("env", "-C", str(loses.folder), "sbatch", "--parsable", "--job-name=loses", *batch)
    loses.job_id = int(requeue_cluster.run([*sbatch, f"--wrap={srun}"]).stdout)
    yield {"saves": saves, "loses": loses}
    for scene in (saves, loses):
        requeue_cluster.run(["scancel", str(scene.job_id)], check=False)


def test_two_calls_through_a_preemption(
    stage: dict[str, Scene], requeue_cluster: Part, tmp_path: Path
) -> None:
    """Looked at while it runs, preempted, and followed to its end: it goes on from what it saved,
    to the bits of one that was left alone, and describe tells the preemption from a requeue."""
    scene = stage["saves"]
    job = str(scene.job_id)
    out = f"hydroslurm-runs/*/logs/{job}_0_log.out"
    scene.wait(
        lambda: any(" step 20 " in one.read_text() for one in scene.folder.glob(out)), "steps"
    )
    assert "begins at step 0\n" in scene.hydroslurm("logs", job).stdout
    matches(
        scene.hydroslurm("describe", job).stdout,
        r"Name: +train_two_calls",
        rf"Slurm: +job {job}, RUNNING on {requeue_cluster.nodes[0]}",
        rf"Command: +python {re.escape(str(TWO_CALLS))} --epochs 3 .*",
        rf"Output: +/.*/logs/{job}_0_log\.err",
        r"At a stop: +the script saves in its own way \(receive_suspend_command\)",
        r"  rank 0 \S+  running since .*",
        r"  1  \S+ \S+: running",
    )
    listed = scene.hydroslurm("list").stdout
    assert re.search(rf"^{job} +train_two_calls +Running +RUNNING +1 +0 +0 ", listed, re.M), listed
    show = "echo $SLURM_PROCID $PWD [$HYDROSLURM_PREEMPT]; exit 7"
    beside = scene.hydroslurm("attach", job, "--", "sh", "-c", show)
    assert (beside.returncode, beside.stdout) == (7, f"0 {scene.folder} []\n"), beside.stderr

    followed = subprocess.Popen(
        [sys.executable, "-m", "hydroslurm.cli", "logs", "-f", job],
        env=scene.cluster.child_environ(),
        stdout=subprocess.PIPE,
        text=True,
    )
    preempt(requeue_cluster, requeue_cluster.nodes[:1])
    scene.touch("hurry")
    said = followed.communicate(timeout=LIMIT_S)[0]
    begun = [int(step) for step in re.findall(r"^begins at step (\d+)$", said, re.MULTILINE)]
    assert len(begun) == 2, said
    assert begun[0] == 0
    assert begun[1] >= 20
    assert f"saved step {begun[1]} in " in said
    assert "DataLoader worker" not in said
    assert TOLD not in said
    matches(
        scene.hydroslurm("describe", job).stdout,
        rf"Slurm: +job {job}, COMPLETED.*",
        r"Restarts: +1",
        r"Preemptions: +1",
        r"  1  \S+ \S+ to \S+ \S+: preempted: SIGTERM received: preempted, with a grace .*",
        r"  2  \S+ \S+ to \S+ \S+: completed",
        r"  \S+ \S+  Succeeded Completed",
    )
    out = tmp_path / "alone.json"
    zygote.ran([TWO_CALLS, *OPTIONS, f"--save={tmp_path / 'alone.pt'}", f"--out={out}"])
    assert json.loads((scene.folder / "out.json").read_text()) == json.loads(out.read_text())


def test_who_saves_nothing_is_told(stage: dict[str, Scene]) -> None:
    """One line of one of the ranks, while the job runs; describe says the same. Its output is one
    file, and each rank has a shell of its own."""
    scene = stage["loses"]
    job = str(scene.job_id)
    log = scene.folder / f"{job}-loses.txt"
    scene.wait(lambda: log.exists() and TOLD in log.read_text(), "the line")
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("hydroslurm:")]
    assert f"hydroslurm doctor {job} says more" in line
    assert "What the script has not saved by itself is lost then" in line
    assert scene.hydroslurm("logs", job).stdout == log.read_text()
    refused = scene.hydroslurm("logs", job, "--replica", "rank-1")
    assert f"rank-1 has no file of its own: what this job prints is in {log}" in refused.stderr
    matches(scene.hydroslurm("describe", job).stdout, "At a stop: +nobody saves: .*", "Ranks: +2")
    beside = scene.hydroslurm("attach", job, "--replica", "rank-1", "--", "printenv")
    assert "\nSLURM_PROCID=1\n" in f"\n{beside.stdout}", beside.stderr
    wrong = scene.hydroslurm("attach", job, "--replica", "rank-2")
    assert "there is no replica 'rank-2'; wanted one of rank-0, rank-1" in wrong.stderr
    assert f"job {job} is cancelled" in scene.hydroslurm("cancel", job).stdout
