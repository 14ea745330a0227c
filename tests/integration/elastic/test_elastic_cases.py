"""What may befall an elastic job on a real Slurm, case by case. `make elastic` runs them. The list
of failure cases, and where each is tested (elastic: tests/elastic, of real processes):

     1  a member is preempted                 test_elastic_job; here (spare)
     2  the member of rank 0 is preempted     elastic/test_spares, test_storms
     3  it returns, or is replaced            test_elastic_job
     4  two at once                           elastic/test_members (one change)
     5  below min                             here; elastic/test_members (saved)
     6  kill -9: rank, agent                  test_elastic_job; elastic/test_sharded, test_restart
        slurmstepd, slurmd                    here
     7  a rank hangs                          here; elastic/test_members, test_restart
     8  kill -9 of the coordinator            test_elastic_job; elastic/test_members
     9  its time limit                        here
    10  SIGTERM in evaluation, first step     elastic/test_storms; faults/test_mixed_world
    11  SIGTERM with loader workers           elastic/test_state; faults/test_mixed_world
    12  killed while a checkpoint is written  checkpoint/test_joint
    13  grace shorter than the save           checkpoint/test_deadline, test_stop (of fixed size)
    14  exit statuses                         trainingjob/test_scenes (of fixed size)
    15  too many failures                     jobs/supervisor/test_elements
    16  ten preemptions                       jobs/supervisor/test_elements
    17  scontrol update NumNodes; --no-kill   test_fixed_size (of fixed size)
    18  scale; by drain                       test_elastic_job; here
    19  every sample once                     make demo (act 3); elastic/test_day, test_restart
    20  the training of a fixed size          elastic/test_members; test_fixed_order (its bits)
    21  one of an older generation            elastic/test_members (it hung); test_membership
    22  a save fails                          elastic/test_members; checkpoint/test_faults
    23  cancelled as a whole                  here
    24  it fails at its start, again          here; elastic/test_failed_meetings
    25  a partition that suspends             here
    26  Lightning                             elastic/test_restart; refused: test_members
    27  changes use no restarts               elastic/test_restart
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import preempt, require_slurm
from integration.elastic.elastic_scene import ElasticScene, slurmd_of

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
    """Four nodes of two CPUs, where an urgent job of one node takes the place of a member; a step
    whose slurmstepd is gone is noticed within thirty seconds."""
    require_slurm()
    spec = ClusterSpec(nodes=4, cpus_per_node=2, partitions=QUICK_TO_GIVE_UP, kill_wait_s=5)
    with DevCluster.up(spec) as running:
        yield running


def test_what_befalls_a_job_and_its_members(cluster: DevCluster, tmp_path: Path) -> None:
    """Case 9: its coordinator, warned of its limit, goes back into the queue under its id, and the
    next start hears from the same members. 7: a member hangs: a failure, and its element is
    cancelled. 6: a slurmstepd is killed: no process is left of an element that has ended. 18: up by
    one, and down by the member of a node that is drained: no step is lost, the others stay."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(size=2)
    before = scene.wait_for_size(2)
    scene.slurm("scancel", "--batch", "--signal=URG", str(scene.job_id))
    scene.wait_for("coordinator", 2)
    scene.wait(lambda: len(scene.nodes()) == 2, "members of the second coordinator")
    assert scene.members == before
    assert (len(scene.entries("generation")), scene.entries("failure")) == (1, [])

    hangs = scene.extra[0]
    os.kill(scene.member_process(hangs), signal.SIGSTOP)
    ended = scene.wait_for("ended")
    assert (ended["member"], ended["how"]) == (hangs, "failure")
    scene.wait_for_size(2, without=hangs)
    assert set(scene.base) < set(scene.members)
    assert [one["member"] for one in scene.entries("failure")] == [hangs]

    lost = scene.extra[0]
    process = scene.member_process(lost)
    os.kill(ancestor(process, "slurmstepd"), signal.SIGKILL)
    scene.wait_for_size(2, without=lost)
    scene.wait(lambda: not Path(f"/proc/{process}").exists(), "end of the old process")
    assert [one["member"] for one in scene.entries("ended")] == [hangs, lost]
    assert max(one["steps_lost"] for one in scene.entries("generation")) <= 1

    before, failures = scene.members, scene.entries("failure")
    assert scene.hydroslurm("scale", str(scene.job_id), "3").returncode == 0
    scene.wait_for_size(3)
    drained = scene.extra[0]
    node = scene.nodes()[drained]
    scene.slurm("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    said = scene.hydroslurm("scale", str(scene.job_id), "2", "--leave", drained)
    assert said.returncode == 0, said.stderr
    scene.wait_for_size(2, without=drained)
    # the coordinator may run on that node, too: it stays, and the node is draining until it ends
    listed = ("squeue", "--noheader", "--array", "--format=%i")
    scene.wait(lambda: drained not in scene.slurm(*listed).split(), "end of its element")
    assert set(before) - {drained} < set(scene.members)
    assert [one["steps_lost"] for one in scene.entries("generation")][-2:] == [0, 0]
    assert scene.entries("failure") == failures
    scene.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
    scene.finish()


@pytest.mark.parametrize(
    ("script", "more", "why"),
    [
        ("member.py, n1", "runPolicy: {backoffLimit: 5}", "2 failures in a row there"),
        (
            "member.py",
            "runPolicy: {backoffLimit: 0}\npreflight: [bash, -c, '[ $SLURMD_NODENAME != n1 ]']",
            "hydroslurm: preflight failed with status 1",
        ),
    ],
)
def test_a_node_that_fails_members_is_excluded(
    cluster: DevCluster, tmp_path: Path, script: str, more: str, why: str
) -> None:
    """After two failures there, or a failed preflight, which counts against no limit, nothing more
    is submitted to it, and describe says why."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(size=2, script=script, more=more)
    assert scene.wait_for("excluded")["node"] == "n1"
    scene.wait_for_size(2)
    said = scene.hydroslurm("describe", str(scene.job_id)).stdout
    (excluded,) = [line for line in said.splitlines() if line.startswith("Excluded: ")]
    assert "node n1: " in excluded
    assert why in excluded
    scene.hydroslurm("cancel", str(scene.job_id))
    scene.assert_nothing_is_left()


def test_everything_is_cancelled_at_once(cluster: DevCluster, tmp_path: Path) -> None:
    """Case 23: `scancel` of the coordinator's job takes its members with it, even if the
    coordinator is killed before it can."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(size=3)
    scene.wait_for_size(3)
    scene.slurm("scancel", "--signal=KILL", "--full", str(scene.job_id))
    scene.slurm("scancel", str(scene.job_id))
    scene.assert_nothing_is_left()
    assert scene.final_condition().type == "Failed"


def test_a_suspended_member_is_replaced(pause_cluster: DevCluster, tmp_path: Path) -> None:
    """Case 25: in a partition that suspends, a suspended member leaves without a step lost, another
    one takes its place, and its own element does not stay behind, suspended."""
    scene = ElasticScene(pause_cluster, tmp_path / "job").submit_elastic(size=2)
    scene.wait_for_size(2)
    suspended = scene.extra[0]
    scene.slurm("scontrol", "suspend", suspended)
    ended = scene.wait_for("ended")
    assert (ended["member"], ended["how"]) == (suspended, "preemption")
    scene.wait_for_size(2, without=suspended)
    assert all(one["steps_lost"] == 0 for one in scene.entries("generation"))
    scene.finish()


def test_below_min_the_run_waits_and_goes_on(cluster: DevCluster, tmp_path: Path) -> None:
    """Case 5: one of two members goes and no node is left: Suspended, with the state in the one
    that stays; with a node again it is Running, at the step at which it stood."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(min=2, max=2, size=2)
    (first, second) = scene.wait_for_size(2)
    scene.slurm("scontrol", "update", "PartitionName=urgent", "State=DOWN")
    scene.slurm("scontrol", "update", "PartitionName=low", "State=DOWN")
    scene.slurm("scancel", second)
    suspended = scene.wait_for("suspended")
    assert (suspended["members"], suspended["min"]) == ([first], 2)
    scene.wait(lambda: scene.conditions[-1].type == "Suspended", "condition")
    step = scene.entries("generation")[-1]["step"]
    assert "Suspended" in scene.hydroslurm("describe", str(scene.job_id)).stdout
    for name in ("urgent", "low"):
        scene.slurm("scontrol", "update", f"PartitionName={name}", "State=UP")
    scene.wait_for_size(2, without=second)
    assert first in scene.members
    again = scene.entries("generation")[-1]
    assert (again["steps_lost"], again["lost"]) == (0, [])
    assert again["step"] >= step
    scene.wait(lambda: scene.conditions[-1].type == "Running", "condition")
    scene.finish()


def test_a_spare_takes_the_place_of_a_preempted_member(cluster: DevCluster, tmp_path: Path) -> None:
    """In the same change, with its number; a new spare is submitted behind it."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(max=2, size=2, rules="spares: 1")
    scene.wait_for_size(2)
    scene.wait(lambda: "Ready" in scene.states().values(), "spare")
    (taken,) = scene.extra
    place = scene.members.index(taken)
    (spare,) = set(scene.states()) - set(scene.members)
    node = scene.nodes()[taken]
    preempt(cluster, [node])
    scene.wait(lambda: taken not in scene.members, "change")
    change = next(one for one in scene.entries("generation") if taken not in one["members"])
    assert change["members"][place] == spare
    assert (change["ranks"], change["steps_lost"], change["joined"]) == (2, 0, [spare])
    scene.wait(lambda: len(set(scene.nodes()) - set(scene.members)) == 1, "another spare")
    scene.finish()


def test_a_killed_slurmd_leaves_no_second_worker(cluster: DevCluster, tmp_path: Path) -> None:
    """Case 6: its node is down, another element takes the place, and when the daemon returns
    nothing runs twice."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(size=2)
    scene.wait_for_size(2)
    lost = scene.extra[0]
    node, process = scene.nodes()[lost], scene.member_process(lost)
    daemon = slurmd_of(cluster, node)
    command = Path(f"/proc/{daemon}/cmdline").read_bytes().split(b"\0")[:-1]
    variables = Path(f"/proc/{daemon}/environ").read_bytes().split(b"\0")[:-1]
    environ = dict(one.split(b"=", 1) for one in variables)
    os.kill(daemon, signal.SIGKILL)
    # sooner than SlurmdTimeout
    scene.slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    ended = scene.wait_for("ended")
    assert (ended["member"], ended["how"]) == (lost, "preemption")
    scene.wait_for_size(2, without=lost)
    returned = subprocess.Popen(command, env=environ)
    try:
        scene.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
        idle = ("idle", "mixed", "allocated")
        scene.wait(lambda: scene.slurm("sinfo", "-hn", node, "-o", "%T").strip() in idle, "node")
        scene.wait(lambda: not Path(f"/proc/{process}").exists(), "end of the old process")
        assert sorted(name for name, _ in scene.member_processes()) == sorted(scene.members)
        scene.finish()
    finally:
        returned.terminate()
        returned.wait()


def ancestor(pid: int, name: str) -> int:
    """The process of that name above it."""
    while pid > 1:
        status = Path(f"/proc/{pid}/status").read_text()
        if f"Name:\t{name}\n" in status:
            return pid
        pid = int(status.partition("PPid:\t")[2].split()[0])
    raise AssertionError(f"no {name} above it")
