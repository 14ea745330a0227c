"""A network that breaks: a training of three nodes, one of which is cut off, deaf, mute, slow or
loses frames while all stop, pause or commit together.

Whatever happens, no two attempts train at once, no commit is lost, every sample comes once and the
bits are those of a training that nobody disturbed.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import require_network
from elasticstory import BATCH, IN_SHARDS, SAMPLES_IN_SHARDS, ElasticStory, losses
from integration.manyranks.rankstraining import AS_IT_IS, CURTAIN, UNBUFFERED, RanksTraining
from kit.network import CUT, DEAF, LOSSY, MUTE, SLOW, Fault, broken, on_node
from kit.team import Team
from processes import Child, wait_until
from stories import Stories, marked, result_of, stories
from training.trainings import steps_lost

from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.rundir import ELASTIC_ENV
from hydroslurm.devcluster import ClusterSpec, DevCluster, network
from hydroslurm.devcluster.layout import Layout
from hydroslurm.elastic.folder import MEMBER_ENV

pytestmark = pytest.mark.slurm

WORLD = 3
NODES = 3 * WORLD + 1
PARTITIONS = """\
TCPTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=5 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""
"""Slurm's own connections would give up after two seconds, which is one way of SLOW."""
SPEC = ClusterSpec(
    nodes=NODES, cpus_per_node=1, kill_wait_s=60, partitions=PARTITIONS, network=True
)
BROKEN_S = 12.0
"""How long a node is cut off: longer than a retransmission, shorter than a node is dead."""
SHORT = ("commit-deaf",)
WAIT = 'touch "task-$SLURM_PROCID"; until [ -e go ]; do sleep 0.1; done; exec '
WHEN_TOLD = f"""sh -c '{WAIT}{AS_IT_IS}' sh "$@\""""
FAULTS = {"cut": CUT, "deaf": DEAF, "mute": MUTE, "slow": SLOW, "lossy": LOSSY}


def stop(training: RanksTraining, node: str, fault: Fault) -> None:
    """All stop together, and the job comes back."""
    with broken(training.cluster, node, fault):
        training.requeue()
        training.wait_for(0, EventKind.STOP_REQUESTED, attempt=1)
        if fault.loss == 1.0:
            time.sleep(BROKEN_S)
            assert f"the stop has not reached rank 1 on {node}" in training.log() or fault is MUTE
        else:
            training.wait_until(lambda: training.attempts()[0].ending, "the stop")
    training.wait_for_ranks(2)


def pause(training: RanksTraining, node: str, fault: Fault) -> None:
    """All park, and go on. A signal asks for it: Slurm's own suspend may never reach the node."""
    pid = training.events_of(0, EventKind.INSTALLED)[0].pid
    with broken(training.cluster, node, fault):
        os.kill(pid, signal.SIGUSR1)
        if fault.loss == 1.0:
            time.sleep(BROKEN_S)
            (failed,) = training.events_of(0, EventKind.AGREEMENT_FAILED)
            assert "the ranks did not come to one collective" in failed.data["message"]
        else:
            training.wait_for(0, EventKind.ALL_PARKED, attempt=1)
    os.kill(pid, signal.SIGUSR2)


def commit(training: RanksTraining, node: str, fault: Fault) -> None:
    """All commit a checkpoint while they train: the first message that is affected is the node's
    own, that it has written its part."""
    with broken(training.cluster, node, fault, b"/written") as begun:
        training.wait_until(begun.is_set, "a part on the disk")
        if fault.loss == 1.0:
            time.sleep(BROKEN_S)
        else:
            training.wait_for(0, EventKind.SAVE_COMMITTED, attempt=1)


def start(training: RanksTraining, node: str, fault: Fault) -> None:
    """The ranks look for each other; Slurm has started them before."""
    training.wait_until(
        lambda: len(list(training.folder.glob("task-*"))) == WORLD, "the tasks of Slurm"
    )
    with broken(training.cluster, node, fault):
        (training.folder / "go").touch()
        if fault.loss == 1.0:
            time.sleep(BROKEN_S)
        else:
            for rank in range(WORLD):
                training.wait_for(rank, EventKind.ATTEMPT_BEGAN, attempt=1)


def split(training: RanksTraining, node: str, fault: Fault) -> None:
    """Slurm takes the node for dead and starts the job elsewhere; then the network heals."""
    where = training.slurm("squeue", "-h", "-j", training.job_id, "-o", "%N")
    nodes = training.slurm("scontrol", "show", "hostnames", where).splitlines()
    with broken(training.cluster, node, fault):
        down = ("State=DOWN", "Reason=cut")
        training.slurm("scontrol", "update", f"NodeName={node}", *down)
        spare = training.cluster.spec.node_names[-1]
        others = ",".join([spare, *(one for one in nodes if one != node)])

        def moved() -> bool:
            return training.slurm("squeue", "-h", "-j", training.job_id, "-o", "%T") == "PENDING"

        training.wait_until(moved, "the job in the queue")
        training.slurm("scontrol", "update", f"JobId={training.job_id}", f"ReqNodeList={others}")
        training.wait_for_ranks(2)
    training.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")


PHASES: dict[str, Callable[[RanksTraining, str, Fault], None]] = {
    "stop": stop,
    "pause": pause,
    "commit": commit,
    "start": start,
    "split": split,
}


def undisturbed(_training: RanksTraining, _node: str, _fault: Fault) -> None:
    """Nothing happens to it."""


def disturbed(cluster: DevCluster, place: Iterator[int], name: str, folder: Path) -> RanksTraining:
    """A training on nodes of its own, whose second node's network breaks in a phase."""
    first = WORLD * (next(place) % (NODES // WORLD))
    nodes = cluster.spec.node_names[first : first + WORLD]
    phase, _, fault = name.partition("-")
    training = RanksTraining(
        cluster,
        folder,
        nodes=WORLD,
        world=WORLD,
        epochs=2,
        command=WHEN_TOLD,
        environ=UNBUFFERED,
    )
    training.submit(f"--nodelist={','.join(nodes)}")
    if phase != "start":
        (training.folder / "go").touch()
        training.wait_for_ranks(1)
        training.wait_for_step(10)
    PHASES.get(phase, undisturbed)(training, nodes[1], FAULTS.get(fault, Fault()))
    training.wait_for_end()
    return training


@pytest.fixture(scope="module")
def networked() -> Iterator[DevCluster]:
    """A cluster whose nodes have a network of their own."""
    require_network()
    with DevCluster.up(SPEC) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def under_way(
    request: pytest.FixtureRequest,
    networked: DevCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stories[RanksTraining]]:
    """The trainings that this session's tests look at."""
    place = itertools.count()
    told = {
        name: functools.partial(disturbed, networked, place, name)
        for name in ["undisturbed", *sorted(marked(request))]
    }
    base = tmp_path_factory.mktemp("network")
    with stories(told, base, clusters=(networked,), at_a_time=NODES // WORLD) as running:
        try:
            yield running
        finally:
            CURTAIN.set()


def scene(name: str, *, long: bool) -> object:
    marks = [pytest.mark.scene(name), *([pytest.mark.long] if long else [])]
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.parametrize(
    "name",
    [
        scene(name, long=name not in SHORT)
        for name in (f"{phase}-{fault}" for phase in PHASES for fault in FAULTS)
        if name not in ("split-slow", "split-lossy")  # no node is taken for dead
    ],
)
def test_a_training_of_three_nodes_survives(
    request: pytest.FixtureRequest, under_way: Stories[RanksTraining], name: str
) -> None:
    """One node's network breaks while all stop, pause or commit."""
    training = result_of(request, under_way, 900.0)
    attempts = training.attempts()
    endings = Counter(attempt.ending for attempt in attempts)
    assert endings["finished"] == 1
    assert len(attempts) == (2 if name.startswith(("stop", "split")) else 1), training.log()
    result, expected = training.result, under_way.result("undisturbed", 900.0).result
    if name.startswith("split"):  # the steps since the newest commit are trained again
        del result["steps_trained_twice"], expected["steps_trained_twice"]
    else:
        assert steps_lost(attempts) == 0, attempts
    assert result == expected
    if name.startswith("commit"):
        assert not training.events_of(0, EventKind.SAVE_FAILED, EventKind.SAVE_ABANDONED)


@pytest.mark.long
def test_a_node_that_vanishes_with_data_in_flight_is_noticed(networked: DevCluster) -> None:
    """At both ends of its connection; keepalive alone, which waits for the data, does not."""
    node, team = networked.spec.node_names[1], Team(host=networked.spec.addresses[0])
    (first,) = team.join(2, 0)
    (second,) = on_node(networked, node, lambda: team.join(2, 1))
    with broken(networked, node, CUT):
        first.call("save")
        second.call("save")
        wait_until(lambda: first.gone == {1: True}, "the coordinator's end to notice")
        wait_until(lambda: (1, EventKind.COORDINATOR_LOST) in team.told, "the rank's end to notice")
        for rank in (first, second):
            rank.leave()


ELASTIC: dict[str, Any] = {"samples": SAMPLES_IN_SHARDS, "epochs": 6, "step_s": 0.03}
IN_FIXED_ORDER: dict[str, Any] = {"max": 3, "summation": "fixed_order"}


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_an_elastic_run_survives(networked: DevCluster, tmp_path: Path, name: str) -> None:
    """The network of one of two members breaks while a third one joins: it is slow, or left
    behind. Each loss and the weights are those of one member that trained alone."""
    alone, changed = tmp_path / "alone", tmp_path / "changed"
    for folder in (alone, changed):
        folder.mkdir()
    with ElasticStory(alone, program=IN_SHARDS, **IN_FIXED_ORDER, wanted=1) as story:
        story.start("x", **ELASTIC | {"step_s": 0.0})
        expected = story.done("x"), losses(story)
    hosts, host = Layout.at(networked.directory).hosts, networked.spec.addresses[0]
    with ElasticStory(changed, program=IN_SHARDS, **IN_FIXED_ORDER, host=host) as story:

        def start(member: str) -> None:
            folder = changed / member
            folder.mkdir()
            environ = {ELASTIC_ENV: str(story.folder.run), MEMBER_ENV: member}
            options = json.dumps({"batch": BATCH, **ELASTIC})
            inside = tuple(network.enter(networked.spec, len(story.members), hosts))
            story.members[member] = Child(
                IN_SHARDS, folder, options, environ=environ, prefix=inside
            )

        start("a")
        start("b")
        story.wait_for_step("a", size=2)
        with broken(networked, networked.spec.node_names[1], FAULTS[name]):
            start("c")
            if FAULTS[name].loss == 1.0:
                story.wait_for_step("c", size=2)  # without b
            else:
                story.wait_for_step("c", size=3, times=1)
        cut_off = FAULTS[name].loss == 1.0
        ends = [story.done(member) for member in ("ac" if cut_off else "abc")]
        if cut_off:
            assert story.entries("failure")[0]["reason"].startswith("silent for")
            # taken for dead, it leaves, whether the others still train or have finished
            assert story.ended("b") in (RUN_AGAIN, 0)
            assert not any(line.startswith("DONE") for line in story.members["b"].lines), story
            assert {one["generation"] for one in story.steps("b")} == {1}
        assert {one["weights"] for one in ends} == {expected[0]["weights"]}, story
        assert losses(story) == expected[1], story
