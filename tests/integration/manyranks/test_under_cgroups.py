"""Where Slurm tracks processes by cgroups, as production does, and counts memory: a suspend freezes
the job step after 2 s, and only the direct children of slurmstepd get its signals. Ranks below
agents are in test_preempted_ranks.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import is_stopped, wait_until
from sbatchfiles import requeue_script
from stories import Stories
from stories import stories as all_under_way
from training.trainings import ALONE_LIMIT_S, Training, steps_lost, trained_alone
from zygote import ran

from hydroslurm.core.events import EventKind
from hydroslurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm

EPOCHS = 4  # of 90 steps
LARGE = Path(__file__).with_name("large_training.py")
LARGE_STEPS = "20"
TIMES_ITS_OWN = 1.5
LIMIT_S = 600.0


@dataclass
class Large(Training):
    """large_training.py with a memory limit."""

    own_bytes: int = 0

    def submit(self, *sbatch_options: str) -> Large:
        self.folder.mkdir(parents=True)
        command = f"python3 -u {LARGE} {self.out} {LARGE_STEPS}"
        script = self.folder / "job.sbatch"
        script.write_text(requeue_script(command))
        limit_kib = int(TIMES_ITS_OWN * self.own_bytes / 1024)
        options = ("--parsable", f"--mem={limit_kib}K", *sbatch_options)
        self.job_id = self.slurm("sbatch", *options, str(script))
        return self


@pytest.fixture(scope="module")
def stories(
    cgroup_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stories[Any]]:
    """All of them, under way."""
    base = tmp_path_factory.mktemp("cgroup")
    nodes = cgroup_cluster.spec.node_names
    here = cgroup_cluster
    told: dict[str, Callable[[Path], Any]] = {
        "paused": lambda folder: _paused_and_preempted(here, folder, node=nodes[0]),
        "large": lambda folder: _stopped_with_little_memory(here, folder, node=nodes[2]),
    }
    with all_under_way(told, base, clusters=(here,), at_a_time=len(told)) as under_way:
        yield under_way


def test_paused_in_place_and_preempted_it_ends_with_the_same_bits(
    stories: Stories[Any], tmp_path: Path
) -> None:
    """Frozen by a suspend and resumed, paused and resumed by scancel --signal, all in one process;
    then preempted by an urgent job, requeued and continued: as if nobody had touched it."""
    alone = trained_alone(tmp_path, epochs=EPOCHS)
    training = stories.result("paused", LIMIT_S)
    attempts = training.attempts()
    assert [attempt.ending for attempt in attempts] == ["preempted", "finished"], training.log()
    assert steps_lost(attempts) == 0
    assert training.wait_for_end() == alone
    first = [event for event in training.events() if event.restart_count == 0]
    assert len({event.pid for event in first}) == 1
    assert sum(event.kind is EventKind.RESUMED for event in first) == 2


def test_a_stop_is_not_killed_for_memory(stories: Stories[Any]) -> None:
    """With half as much memory again as it uses by itself, a training whose state is most of that
    saves periodically, stops, is requeued and goes on, with the same bits; it says once in each
    attempt that it cannot copy its state."""
    training, alone = stories.result("large", LIMIT_S)
    attempts = training.attempts()
    assert [attempt.ending for attempt in attempts] == ["requeued", "finished"], training.log()
    assert steps_lost(attempts) == 0
    assert training.log().count("a copy of the state in memory would take") == 2
    result = training.wait_for_end()
    assert {**result, "own_bytes": 0} == {**alone, "own_bytes": 0}


def _paused_and_preempted(cluster: DevCluster, folder: Path, *, node: str) -> Training:
    training = Training(cluster, folder, EPOCHS, think_s=0.03).submit(f"--nodelist={node}")
    training.wait_for_attempt(1)
    pid = training.events()[-1].pid
    training.slurm("scontrol", "suspend", training.job_id)
    wait_until(lambda: is_stopped(pid), "the freezer")
    training.slurm("scontrol", "resume", training.job_id)
    training.wait_for_pauses(1, number=1)
    training.slurm("scancel", "--signal=USR1", training.job_id)
    wait_until(lambda: _count(training, EventKind.PARKED) == 2, "the pause")
    assert not is_stopped(pid)
    training.slurm("scancel", "--signal=USR2", training.job_id)
    training.wait_for_pauses(1, number=2)
    urgent = ("--partition=urgent", "--nodes=1", f"--nodelist={node}", "--exclusive", "--time=1")
    training.slurm("srun", *urgent, "true")
    training.wait_for_end()
    return training


def _stopped_with_little_memory(
    cluster: DevCluster, folder: Path, *, node: str
) -> tuple[Training, dict[str, Any]]:
    alone = _large_alone(folder.with_name(f"{folder.name}-alone"))
    training = Large(cluster, folder, 1, own_bytes=alone["own_bytes"])
    training.submit(f"--nodelist={node}")
    training.wait_for_step(10)  # beyond the first periodic save
    training.slurm("scontrol", "requeue", training.job_id)
    training.wait_for_attempt(2)
    training.wait_for_end()
    shutil.rmtree(training.run.checkpoints)  # some GB
    return training, alone


def _large_alone(folder: Path) -> dict[str, Any]:
    """What comes of it when nobody stops it, without Slurm, and what it uses."""
    folder.mkdir()
    done = ran([LARGE, folder / "out", LARGE_STEPS, folder / "r"], timeout=ALONE_LIMIT_S)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / "r")
    return dict(json.loads((folder / "out").read_text()))


def _count(training: Training, kind: EventKind) -> int:
    return sum(event.kind is kind for event in training.events())
