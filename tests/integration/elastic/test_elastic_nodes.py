"""Nodes and Slurm's own daemons die under an elastic job, there are too few of them, a spare waits
on one, and rules choose how many there are."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import require_slurm
from integration.elastic.elastic_scene import ElasticScene

from hydroslurm.devcluster import ClusterSpec, DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]
QUICK_TO_GIVE_UP = """\
SlurmdTimeout=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=5 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """Four nodes of two CPUs; one that does not answer for thirty seconds is down,
    and a busy machine's daemons answer sooner."""
    require_slurm()
    spec = ClusterSpec(nodes=4, cpus_per_node=2, partitions=QUICK_TO_GIVE_UP, kill_wait_s=5)
    with DevCluster.up(spec) as running:
        yield running


def finish(scene: ElasticScene) -> None:
    """It ends well, and nothing of it is left."""
    scene.finish()
    assert scene.final_condition().type == "Succeeded"
    scene.assert_nothing_is_left()


def test_below_min_the_run_waits_and_goes_on(cluster: DevCluster, tmp_path: Path) -> None:
    """Case 5: one of two members goes and no node is left: Suspended, with the state in the one
    that stays; with a node again it is Running, at the step at which it stood."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(min=2, max=2, size=2)
    (first, second) = scene.wait_for_size(2)
    # all other CPUs are taken first, so that no replacement can start
    rest = scene.slurm(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=4",
        "--overcommit",
        "--exclusive",
        "--wrap=sleep 600",
        "--hold",
    ).strip()
    scene.slurm("scontrol", "update", "PartitionName=urgent", "State=DOWN")
    scene.slurm("scontrol", "update", "PartitionName=low", "State=DOWN")
    scene.slurm("scancel", second)
    suspended = scene.wait_for("suspended")
    assert (suspended["members"], suspended["min"]) == ([first], 2)
    scene.wait(lambda: scene.conditions[-1].type == "Suspended", "condition")
    step = scene.entries("generation")[-1]["step"]
    assert "Suspended" in scene.hydroslurm("describe", str(scene.job_id)).stdout
    scene.slurm("scancel", rest)
    for name in ("urgent", "low"):
        scene.slurm("scontrol", "update", f"PartitionName={name}", "State=UP")
    scene.wait(lambda: len(scene.members) == 2 and second not in scene.members, "replacement")
    assert first in scene.members
    again = scene.entries("generation")[-1]
    assert (again["steps_lost"], again["lost"]) == (0, [])
    assert again["step"] >= step
    scene.wait(lambda: scene.conditions[-1].type == "Running", "condition")
    finish(scene)


def test_a_drained_node_gives_its_member_back(cluster: DevCluster, tmp_path: Path) -> None:
    """Case 18: up by one and down by the member of a node that is drained: no step is lost, and the
    others are the same."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(size=2)
    before = scene.wait_for_size(2)
    assert scene.hydroslurm("scale", str(scene.job_id), "3").returncode == 0
    scene.wait_for_size(3)
    drained = scene.extra[0]
    node = scene.nodes()[drained]
    scene.slurm("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    said = scene.hydroslurm("scale", str(scene.job_id), "2", "--leave", drained)
    assert said.returncode == 0, said.stderr
    scene.wait(lambda: len(scene.members) == 2 and drained not in scene.members, "smaller size")
    # the coordinator may run on that node, too: it stays, and the node is draining until it ends
    listed = ("squeue", "--noheader", "--array", "--format=%i")
    scene.wait(lambda: drained not in scene.slurm(*listed).split(), "end of its element")
    assert set(before) - {drained} < set(scene.members)
    assert [one["steps_lost"] for one in scene.entries("generation")] == [0, 0, 0]
    assert not scene.entries("failure")
    scene.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
    finish(scene)


def test_a_spare_takes_the_place_of_a_preempted_member(cluster: DevCluster, tmp_path: Path) -> None:
    """In the same change, with its number; a new spare is submitted behind it."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(max=2, size=2, rules="spares: 1")
    scene.wait_for_size(2)
    scene.wait(lambda: len(scene.nodes()) == 3, "spare")
    (taken,) = scene.extra
    place = scene.members.index(taken)
    (spare,) = set(scene.nodes()) - set(scene.members)
    node = scene.nodes()[taken]
    scene.slurm("srun", "--partition=urgent", f"--nodelist={node}", "--exclusive", "sleep", "1")
    scene.wait(lambda: taken not in scene.members, "change")
    change = next(one for one in scene.entries("generation") if taken not in one["members"])
    assert change["members"][place] == spare
    assert (change["ranks"], change["steps_lost"], change["joined"]) == (2, 0, [spare])
    scene.wait(lambda: len(set(scene.nodes()) - set(scene.members)) == 1, "another spare")
    finish(scene)


def test_a_rule_changes_the_size(cluster: DevCluster, tmp_path: Path) -> None:
    """A rule that asks for three has another member submitted, which joins; the ledger says that it
    was the autoscaler, and why."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(
        max=3, size=2, rules="autoscale: {scaleUp: {stabilizationWindowSeconds: 0}}"
    )
    before = scene.wait_for_size(2)
    after = scene.wait_for_size(3)
    assert set(before) < set(after)
    (wanted,) = scene.entries("wanted")
    assert (wanted["size"], wanted["by"]) == (3, "autoscaler: as many as may be")
    assert all(one["steps_lost"] == 0 for one in scene.entries("generation"))
    finish(scene)


def test_a_killed_slurmstepd_leaves_no_process(cluster: DevCluster, tmp_path: Path) -> None:
    """Case 6: Slurm has nothing of its ranks any more, and counts the element as ended: the member
    leaves and another one takes its place."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(size=2)
    scene.wait_for_size(2)
    lost = scene.extra[0]
    process = scene.member_process(lost)
    stepd = ancestor(process, "slurmstepd")
    os.kill(stepd, signal.SIGKILL)
    scene.wait(lambda: len(scene.members) == 2 and lost not in scene.members, "replacement")
    scene.wait(lambda: not Path(f"/proc/{process}").exists(), "end of the old process")
    assert [one["member"] for one in scene.entries("ended")] == [lost]
    finish(scene)


def test_a_killed_slurmd_leaves_no_second_worker(cluster: DevCluster, tmp_path: Path) -> None:
    """Case 6: its node is down after SlurmdTimeout, another element takes the place, and when the
    daemon returns nothing runs twice."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(size=2)
    scene.wait_for_size(2)
    lost = scene.extra[0]
    node, process = scene.nodes()[lost], scene.member_process(lost)
    (daemon,) = [one for one in cluster.status().daemons if one.name == f"slurmd-{node}"]
    command = Path(f"/proc/{daemon.pid}/cmdline").read_bytes().split(b"\0")[:-1]
    variables = Path(f"/proc/{daemon.pid}/environ").read_bytes().split(b"\0")[:-1]
    environ = dict(one.split(b"=", 1) for one in variables)
    os.kill(daemon.pid, signal.SIGKILL)
    ended = scene.wait_for("ended")
    assert (ended["member"], ended["how"]) == (lost, "preemption")
    scene.wait(lambda: len(scene.members) == 2 and lost not in scene.members, "replacement")
    returned = subprocess.Popen(command, env=environ)
    try:
        idle = ("idle", "mixed", "allocated")
        scene.wait(lambda: scene.slurm("sinfo", "-hn", node, "-o", "%T").strip() in idle, "node")
        scene.wait(lambda: not Path(f"/proc/{process}").exists(), "end of the old process")
        assert sorted(name for name, _ in scene.member_processes()) == sorted(scene.members)
        finish(scene)
    finally:
        returned.terminate()
        returned.wait()


def ancestor(pid: int, name: str) -> int:
    """The process of that name above it."""
    while pid > 1:
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        if status["Name"] == name:
            return pid
        pid = int(status["PPid"])
    raise AssertionError(f"no {name} above it")
