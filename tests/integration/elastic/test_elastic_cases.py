"""What may befall an elastic job on a real Slurm, case by case. `make elastic` runs them. The list
of failure cases, and where each is tested (elastic: tests/elastic, of real processes):

     1  a member is preempted                 here; test_elastic_job
     2  the member of rank 0 is preempted     here; elastic/test_members
     3  it returns, or is replaced            here
     4  two at once                           elastic/test_members (one change)
     5  below min                             test_elastic_nodes; elastic/test_members (saved)
     6  kill -9: rank, agent                  here; elastic/test_restart
        slurmstepd, slurmd                    test_elastic_nodes
     7  a rank hangs                          here; elastic/test_members, test_restart
     8  kill -9 of the coordinator            test_elastic_job; elastic/test_members
     9  its time limit                        here
    10  SIGTERM in evaluation, first step     elastic/test_storms; faults/test_mixed_world
    11  SIGTERM with loader workers           elastic/test_members; test_fixed_order
    12  killed while a checkpoint is written  checkpoint/test_kills
    13  grace shorter than the save           checkpoint/test_deadline, test_stop (of fixed size)
    14  exit statuses                         trainingjob/test_policies (of fixed size)
    15  too many failures                     here
    16  ten preemptions                       here
    17  scontrol update NumNodes; --no-kill   test_fixed_size (of fixed size)
    18  scale; by drain                       test_elastic_job; test_elastic_nodes
    19  every sample once                     here; elastic/test_day, test_restart
    20  the training of a fixed size          elastic/test_members; test_fixed_order (its bits)
    21  one of an older generation            elastic/test_members (it hung); test_membership
    22  a save fails                          elastic/test_members; checkpoint/test_faults
    23  cancelled as a whole                  here
    24  it fails at its start, again          here (15); elastic/test_failed_meetings
    25  a partition that suspends             here
    26  Lightning                             here; in place it is refused: elastic/test_own_loops
    27  restarts are not used by 50 changes   elastic/test_restart
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import textwrap
from pathlib import Path

import pytest
from clusters import require_slurm
from elasticstory import TRAIN, times_seen
from integration.elastic.elastic_scene import ElasticScene
from restartstory import NOTES, SCRIPTS, STOCK, check_stock_training, said

from hydroslurm.devcluster import ClusterSpec, DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster():
    """Four nodes of two CPUs: an urgent job of one node takes the place of a member."""
    require_slurm()
    spec = ClusterSpec(nodes=4, cpus_per_node=2, profile="requeue", kill_wait_s=5)
    with DevCluster.up(spec) as running:
        yield running


def test_a_preempted_member_is_replaced(cluster: DevCluster, tmp_path: Path) -> None:
    """Cases 1, 3: an urgent job takes a node; the others go on without a step lost, their jobs are
    the same, and a fresh element takes the place."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(size=3)
    before = scene.wait_for_size(3)
    node = scene.nodes()[scene.extra[0]]
    scene.slurm("srun", "--partition=urgent", f"--nodelist={node}", "--ntasks=1", "sleep", "1")
    ended = scene.wait_for("ended")
    taken = ended["member"]
    assert (ended["how"], ended["node"]) == ("preemption", node)
    assert taken not in scene.base
    scene.wait(lambda: len(scene.members) == 3 and taken not in scene.members, "replacement")
    assert set(before) - {taken} < set(scene.members)
    assert all(one["steps_lost"] == 0 for one in scene.entries("generation"))
    scene.hydroslurm("cancel", str(scene.job_id))
    scene.assert_nothing_is_left()
    assert scene.final_condition().reason == "Cancelled"


def test_a_training_has_every_sample_once(cluster: DevCluster, tmp_path: Path) -> None:
    """A real one: a member is preempted, one is killed, each is replaced. All that
    are left have the same weights, and each sample of each epoch was trained on once."""
    scene = ElasticScene(cluster, tmp_path / "job")
    scene.folder.mkdir()
    hurry = scene.folder / "hurry"
    script = textwrap.dedent(TRAIN).replace(
        'options.get("step_s", 0.02)', f"0.0 if os.path.exists({str(hurry)!r}) else 0.1"
    )
    (scene.folder / "train.py").write_text(script)
    options = json.dumps({"samples": 9600, "batch": 4, "epochs": 2})
    scene.submit_elastic(size=3, script=f"train.py, '{options}'")
    before = scene.wait_for_size(3)

    taken = scene.extra[-1]
    scene.slurm("scancel", taken)  # as a preemption: SIGTERM, then SIGKILL
    scene.wait(lambda: len(scene.members) == 3 and taken not in scene.members, "replacement")
    killed = scene.extra[0]
    os.kill(scene.member_process(killed, script="train.py"), signal.SIGKILL)
    scene.wait(lambda: len(scene.members) == 3 and killed not in scene.members, "replacement")
    told = scene.hydroslurm("describe", str(scene.job_id)).stdout
    assert "Engine:       in_place" in told
    hurry.touch()
    assert scene.final_condition().type == "Succeeded"

    lines = [
        line.split(" ", 1)
        for path in scene.run.logs.glob("member-*-0.log")
        for line in path.read_text().splitlines()
        if line.startswith(("BEGUN ", "DONE "))
    ]
    begun = [json.loads(text) for kind, text in lines if kind == "BEGUN"]
    for epoch, seen in times_seen(begun).items():
        assert seen == dict.fromkeys(range(9600), 1), epoch
    done = [json.loads(text) for kind, text in lines if kind == "DONE"]
    assert len(done) == 3
    assert len({one["weights"] for one in done}) == 1
    assert sorted(one["how"] for one in scene.entries("ended")[:2]) == ["failure", "preemption"]
    lost = [(one["lost"], one["steps_lost"]) for one in scene.entries("generation")]
    assert max(count for _, count in lost) <= 1
    assert all(count == 0 for members, count in lost if killed not in members), lost
    assert set(before) - {taken, killed} < set(scene.members)
    scene.assert_nothing_is_left()


@pytest.mark.parametrize("script", STOCK.values(), ids=STOCK)
def test_a_script_that_knows_nothing_of_it(
    cluster: DevCluster, tmp_path: Path, script: str
) -> None:
    """Case 26: an urgent job takes a member of Lightning's or Hugging Face's Trainer inside an
    epoch, and a fresh one comes; at last one of the two trains on alone. Every sample comes once,
    and the weights are those of these steps."""
    scene = ElasticScene(cluster, tmp_path / "job")
    scene.folder.mkdir()
    shutil.copy(SCRIPTS / script, scene.folder / "train.py")
    shutil.copy(NOTES, scene.folder)
    told = {"samples": 2400, "batch": 4, "epochs": 1, "step_s": 0.1, "lr": 0.02}
    options = json.dumps({"folder": str(scene.folder), **told})
    more = "preemption: {mode: requeue}"
    scene.submit_elastic(script=f"train.py, '{options}'", engine="restart", size=2, more=more)
    scene.wait_for_size(2)
    (taken,) = scene.extra
    scene.wait(lambda: len(said(scene.folder, "step", member=taken)) > 5, f"steps of {taken}")
    node = scene.nodes()[taken]
    scene.slurm("srun", "--partition=urgent", f"--nodelist={node}", "--exclusive", "sleep", "1")
    ended = scene.wait_for("ended")
    assert (ended["member"], ended["how"], ended["node"]) == (taken, "preemption", node)
    scene.wait(lambda: len(scene.members) == 2 and taken not in scene.members, "replacement")
    (fresh,) = scene.extra
    scene.wait(lambda: len(said(scene.folder, "step", member=fresh)) > 5, f"steps of {fresh}")
    scene.hydroslurm("scale", str(scene.job_id), "1")
    assert scene.final_condition().type == "Succeeded"
    assert {one["size"] for one in said(scene.folder, "step")} == {1, 2}
    check_stock_training(scene.folder, lr=0.02, epochs=1)
    assert {one["steps_lost"] for one in scene.entries("resumed")} == {0}
    scene.assert_nothing_is_left()


def test_the_member_of_rank_0_is_taken(cluster: DevCluster, tmp_path: Path) -> None:
    """Case 2: the first member goes, and the others have all that it had."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(size=3)
    first, *others = scene.wait_for_size(3)
    scene.slurm("scancel", first)
    scene.wait(lambda: first not in scene.members, "generation without it")
    assert set(others) <= set(scene.members)
    assert all(one["steps_lost"] == 0 for one in scene.entries("generation"))
    scene.finish()
    assert scene.final_condition().type == "Succeeded"
    scene.assert_nothing_is_left()


@pytest.mark.parametrize("signo", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_dies_or_hangs_is_replaced(
    cluster: DevCluster, tmp_path: Path, signo: signal.Signals
) -> None:
    """Cases 6, 7: one failure is counted, the element of a hanging member is cancelled."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(size=2)
    scene.wait_for_size(2)
    lost = scene.extra[0]
    victim = scene.member_process(lost)
    os.kill(victim, signo)
    ended = scene.wait_for("ended")
    assert (ended["member"], ended["how"]) == (lost, "failure")
    scene.wait(lambda: len(scene.members) == 2 and lost not in scene.members, "replacement")
    assert set(scene.base) < set(scene.members)
    assert [one["member"] for one in scene.entries("failure")] == [lost]
    assert max(one["steps_lost"] for one in scene.entries("generation")) <= 1
    scene.finish()
    assert scene.final_condition().type == "Succeeded"
    scene.assert_nothing_is_left()


def test_the_coordinators_time_limit_is_no_end(cluster: DevCluster, tmp_path: Path) -> None:
    """Case 9: warned of its limit it goes back into the queue under its id, and its next start
    hears from the same members."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(size=2)
    before = scene.wait_for_size(2)
    scene.slurm("scancel", "--batch", "--signal=URG", str(scene.job_id))
    scene.wait_for("coordinator", 2)
    scene.wait(lambda: len(scene.nodes()) == 2, "members of the second coordinator")
    assert scene.members == before
    assert len(scene.entries("generation")) == 1
    assert not scene.entries("failure")
    scene.finish()
    assert scene.final_condition().type == "Succeeded"
    scene.assert_nothing_is_left()


def test_ten_preemptions_are_no_failure(cluster: DevCluster, tmp_path: Path) -> None:
    """Case 16: budgets are apart."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(
        size=2, more="runPolicy: {backoffLimit: 1}"
    )
    for count in range(1, 11):
        scene.wait_for_size(2)
        newest = scene.extra[0]
        scene.slurm("scancel", newest)
        assert scene.wait_for("ended", count)["how"] == "preemption"
        scene.wait(lambda gone=newest: gone not in scene.members, "generation without it")
    scene.finish()
    assert scene.final_condition().type == "Succeeded"
    scene.assert_nothing_is_left()


def test_a_node_that_fails_members_is_excluded(cluster: DevCluster, tmp_path: Path) -> None:
    """After two failures there nothing more is submitted to it, and describe says why."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(
        size=2, script="member.py, n1", more="runPolicy: {backoffLimit: 5}"
    )
    assert scene.wait_for("excluded")["node"] == "n1"
    scene.wait_for_size(2)
    said = scene.hydroslurm("describe", str(scene.job_id)).stdout
    assert "Excluded:     node n1: 2 members failed there" in said
    scene.hydroslurm("cancel", str(scene.job_id))
    scene.assert_nothing_is_left()


def test_too_many_failures_end_the_run(cluster: DevCluster, tmp_path: Path) -> None:
    """Case 15: the one that is too many is the end, with its reason, and nothing is left."""
    scene = ElasticScene(cluster, tmp_path / "job").submit_elastic(
        size=2, script="member.py, n1, n2, n3, n4", more="runPolicy: {backoffLimit: 2}"
    )
    verdict = scene.final_condition()
    assert (verdict.type, verdict.reason) == ("Failed", "BackoffLimitExceeded")
    assert "backoffLimit is 2" in verdict.message
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
    scene.wait(lambda: len(scene.members) == 2 and suspended not in scene.members, "replacement")
    assert all(one["steps_lost"] == 0 for one in scene.entries("generation"))
    scene.finish()
    assert scene.final_condition().type == "Succeeded"
    scene.assert_nothing_is_left()
