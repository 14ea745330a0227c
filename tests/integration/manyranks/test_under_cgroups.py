"""Where Slurm counts memory by cgroups, as production does. A suspend, which freezes the job step
there, is looked at in test_preempted_ranks.py."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sbatchfiles import requeue_script
from training.trainings import ALONE_LIMIT_S, Training, steps_lost
from zygote import ran

from hydroslurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm

LARGE = Path(__file__).with_name("large_training.py")
EVERY_STEPS = 4
TIMES_ITS_OWN = 1.5


@dataclass
class Large(Training):
    """large_training.py with a memory limit."""

    own_bytes: int = 0

    def submit(self, *sbatch_options: str) -> Large:
        self.folder.mkdir(parents=True)
        command = f"python3 -u {LARGE} {self.out} {EVERY_STEPS}"
        script = self.folder / "job.sbatch"
        script.write_text(requeue_script(command))
        limit_kib = int(TIMES_ITS_OWN * self.own_bytes / 1024)
        options = ("--parsable", f"--mem={limit_kib}K", *sbatch_options)
        self.job_id = self.slurm("sbatch", *options, str(script))
        return self


def test_a_stop_is_not_killed_for_memory(cgroup_cluster: DevCluster, tmp_path: Path) -> None:
    """With half as much memory again as it uses by itself, a training whose state is most of that
    saves periodically, stops, is requeued and goes on, with the same bits; it says once in each
    attempt that it cannot copy its state."""
    alone = _large_alone(tmp_path / "alone")
    training = Large(cgroup_cluster, tmp_path / "job", 1, own_bytes=alone["own_bytes"])
    training.submit()
    training.wait_for_step(EVERY_STEPS + 1)  # beyond the first periodic save
    training.slurm("scontrol", "requeue", training.job_id)
    training.wait_for_attempt(2)
    result = training.wait_for_end()
    shutil.rmtree(training.run.checkpoints)  # some GB
    attempts = training.attempts()
    assert [attempt.ending for attempt in attempts] == ["requeued", "finished"], training.log()
    assert steps_lost(attempts) == 0
    assert training.log().count("a copy of the state in memory would take") == 2
    assert {**result, "own_bytes": 0} == {**alone, "own_bytes": 0}


def _large_alone(folder: Path) -> dict[str, Any]:
    """What comes of it when nobody stops it, without Slurm, and what it uses."""
    folder.mkdir()
    done = ran([LARGE, folder / "out", "0", folder / "r"], timeout=ALONE_LIMIT_S)
    assert done.returncode == 0, done.stderr
    return dict(json.loads((folder / "out").read_text()))
