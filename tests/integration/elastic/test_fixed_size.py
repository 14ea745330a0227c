"""Case 17: a job of a fixed size loses a node while it trains. An operator takes the node back
(`scontrol update NumNodes`), or it dies, in each of the three ways in which Slurm may take that."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import require_slurm
from integration.elastic.elastic_scene import slurmd_of
from integration.manyranks.acts import COMPARABLE
from integration.manyranks.rankstraining import EVERY_STEPS, RanksTraining

from hydroslurm.core.events import EventKind
from hydroslurm.devcluster import ClusterSpec, DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]
RANKS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """Six nodes, of which three are lost."""
    require_slurm()
    spec = ClusterSpec(nodes=6, cpus_per_node=2, profile="requeue", kill_wait_s=5)
    with DevCluster.up(spec) as running:
        yield running


def training(cluster: DevCluster, folder: Path) -> RanksTraining:
    more: dict[str, Any] = {"options": COMPARABLE, "think_s": 0.01, "epochs": 3}
    return RanksTraining(cluster, folder, world=RANKS, nodes=RANKS, **more)


@pytest.fixture(scope="module")
def undisturbed(cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the weights come to."""
    alone = training(cluster, tmp_path_factory.mktemp("alone") / "job").submit()
    return str(alone.wait_for_end()["weights_sha256"])


def state(one: RanksTraining) -> str:
    return one.slurm("squeue", "-h", "-j", one.job_id, "-t", "all", "-o", "%T").strip()


def begun(cluster: DevCluster, folder: Path, *sbatch_options: str) -> tuple[RanksTraining, int]:
    """A training some steps behind its first checkpoint, and the process of its last rank."""
    one = training(cluster, folder).submit(*sbatch_options)
    one.wait_for_ranks(1)
    one.wait_for_step(EVERY_STEPS + 8)
    return one, one.pid(RANKS - 1, attempt=1)


def check_second_attempt(one: RanksTraining, undisturbed: str) -> None:
    """All ranks again, from the checkpoint on, to the bits of a training that lost nothing; what is
    trained twice is what came behind that checkpoint."""
    one.wait_for_ranks(2)
    result = one.wait_for_end()
    _, again = one.attempts()
    assert (again.step, again.ending) == (EVERY_STEPS, "finished"), one.log()
    assert (result["world_size"], result["steps_missing"]) == (RANKS, [])
    assert all(result["every_sample_once"])
    assert result["steps_trained_twice"] < EVERY_STEPS
    assert result["weights_sha256"] == undisturbed


def test_a_node_that_is_taken_away_fails_the_job(
    cluster: DevCluster, tmp_path: Path, undisturbed: str
) -> None:
    """Slurm kills the ranks of that node without a word before; the others hear of it and end, so
    that nothing hangs. The job has failed. Requeued by hand it has its old size again."""
    one, lost = begun(cluster, tmp_path / "job")
    one.slurm("scontrol", "update", f"JobId={one.job_id}", f"NumNodes={RANKS - 1}")
    one.wait_until(lambda: state(one) == "FAILED", "the end of the job")
    assert not Path(f"/proc/{lost}").exists()
    assert "task 2: Killed" in one.log()
    assert not one.events_of(RANKS - 1, EventKind.STOP_REQUESTED)
    one.requeue()
    check_second_attempt(one, undisturbed)


@pytest.mark.parametrize(
    ("options", "after"),
    [
        ((), "PENDING"),
        (("--no-kill",), "FAILED"),
        (("--no-kill", "--export=ALL,SLURM_NO_KILL=set"), "RUNNING"),
    ],
    ids=["requeued", "no-kill of the job", "no-kill of the job and of srun"],
)
def test_a_dead_node(
    cluster: DevCluster, tmp_path: Path, undisturbed: str, options: tuple[str, ...], after: str
) -> None:
    """Without --no-kill Slurm requeues the job, and it goes on by itself. With it for the job all
    ranks are killed, and the job has failed. With it for srun, too, the other ranks live on, in a
    collective with one that is gone, until somebody requeues the job."""
    one, lost = begun(cluster, tmp_path / "job", *options)
    names = one.slurm("squeue", "-h", "-j", one.job_id, "-o", "%N")
    node = one.slurm("scontrol", "show", "hostnames", names).split()[RANKS - 1]
    others = [one.pid(rank, attempt=1) for rank in range(RANKS - 1)]
    # a node without power answers nobody and closes no connection
    os.kill(lost, signal.SIGSTOP)
    os.kill(slurmd_of(cluster, node), signal.SIGKILL)
    one.slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    one.wait_until(lambda: state(one) == after, f"the job to be {after}")
    assert all(Path(f"/proc/{pid}").exists() for pid in others) == (after == "RUNNING")
    os.kill(lost, signal.SIGKILL)
    if after != "PENDING":
        one.requeue()
    check_second_attempt(one, undisturbed)
