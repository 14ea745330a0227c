"""Two nodes on one machine, which meet in torch's c10d rendezvous."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs.agent.agentworkers import Scene
from processes import Child, free_port, wait_until

from hydroslurm.jobs.agent import workers as proc

KEEP_ALIVE_S = 2
SUSPENDED_S = 4.0
LAST_CALL = ",last_call_timeout=6"
"""Long enough for two agents that start together, and what a restart alone waits."""


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@contextlib.contextmanager
def two_nodes(
    scene: Scene, *, nodes: str = "2", restarts: int = 2, conf: str = ""
) -> Iterator[tuple[Child, Child]]:
    """Two agents with one worker each, which have announced themselves: of the first with the
    store, and rank 0, and of the second."""
    options = (
        f"--nnodes={nodes}",
        "--nproc-per-node=1",
        f"--max-restarts={restarts}",
        "--local-addr=127.0.0.1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=two-nodes",
    )
    conf = f"--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt={KEEP_ALIVE_S}{conf}"
    with (
        scene.agent(*options, f"{conf},is_host=1", name="a") as a,
        scene.agent(*options, f"{conf},is_host=0", name="b") as b,
    ):
        scene.wait_announced()
        yield (a, b) if _has_children(a.pid, scene.pid(0)) else (b, a)


def suspend(pids: list[int]) -> None:
    """What slurmd does to a job behind the SIGTSTP, for longer than the keep-alive."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(SUSPENDED_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("announced", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_suspend_longer_than_the_keep_alive(scene: Scene, announced: bool) -> None:
    """The workers go on in the same processes, and one that fails later is started again, with its
    peer on the other node; also where no SIGTSTP comes before."""
    with two_nodes(scene) as agents:
        before = scene.pids()
        for agent in agents if announced else ():
            agent.signal(signal.SIGTSTP)
        for node in range(2) if announced else ():
            scene.wait_state("parked", node=node)
        suspend([*before, *(agent.pid for agent in agents)])
        for node in range(2):
            scene.wait_told(node, "SIGCONT")
            scene.wait_state("running", node=node)
        # the heartbeats that follow are what would find the nodes dead
        time.sleep(KEEP_ALIVE_S)
        assert scene.pids() == before
        scene.leave(0, 3)
        scene.wait_announced(times=2)
        assert scene.attempts(0) == scene.attempts(1)
        assert len(set(scene.attempts(0))) == 2
        for rank in range(2):
            scene.leave(rank, 0)
        assert [agent.wait() for agent in agents] == [0, 0]


def test_a_node_that_goes_first_takes_no_other_with_it(scene: Scene) -> None:
    """The agent with the store is lost while the other node's worker has yet to hear of a stop:
    that one saves undisturbed, and its node leaves with its status."""
    with two_nodes(scene) as (with_store, other):
        scene.leave(0, 75)
        wait_until(lambda: "leaves 75" in scene.told(0), "rank 0 has left")
        with_store.signal(signal.SIGKILL)
        with_store.wait()
        # ten looks at the store that is gone
        time.sleep(1.0)
        scene.leave(1, 75)
        assert other.wait() == 75
        assert "SIGTERM" not in scene.told(1)


def test_a_stop_while_the_others_are_waited_for(scene: Scene) -> None:
    """A node whose workers have finished waits for the others; a stop ends that with 0."""
    with two_nodes(scene) as (first, _):
        _ends(scene, first, 0)
        first.signal(signal.SIGTERM)
        assert first.wait() == 0


def _has_children(pid: int, child: int) -> bool:
    return child in list(proc.family(pid))


def _ends(scene: Scene, agent: Child, rank: int) -> None:
    """Have the only worker of an agent finish, and wait until the agent has seen it."""
    worker = scene.pid(rank)
    scene.leave(rank, 0)
    wait_until(lambda: not _has_children(agent.pid, worker), "the agent has seen it end")


@pytest.mark.parametrize(
    ("failing", "is_stopped"),
    [(1, False), *(pytest.param(node, True, marks=pytest.mark.long) for node in (0, 1))],
)
def test_a_worker_that_fails_after_the_others_have_ended(
    scene: Scene, failing: int, is_stopped: bool
) -> None:
    """It is restarted alone, as by stock torchrun; also if its node was stopped for longer than
    the keep-alive. The node that has ended waits for it."""
    with two_nodes(scene, nodes="1:2", conf=LAST_CALL) as agents:
        _ends(scene, agents[1 - failing], 1 - failing)
        if is_stopped:
            suspend([agents[failing].pid, scene.pid(failing)])
        scene.leave(failing, 3)
        scene.wait_told(0, "announced", times=2)
        assert [place.rpartition(" ")[2] for place in scene.places(0)] == ["2", "1"]
        assert agents[1 - failing].process.poll() is None
        scene.leave(0, 0)
        assert (agents[failing].wait(), agents[1 - failing].wait()) == (0, 0)
    assert len(scene.places(0) + scene.places(1)) == 3


@pytest.mark.parametrize(
    ("nodes", "restarts", "status"),
    [
        ("1:2", 2, -signal.SIGKILL),
        pytest.param("1:2", 0, 3, marks=pytest.mark.long),
        ("2", 2, 3),
    ],
)
def test_a_node_that_ends_badly_does_not_hold_those_that_have_ended(
    scene: Scene, nodes: str, restarts: int, status: int
) -> None:
    """Its agent is killed, or its worker fails without a restart left, or with too few nodes for
    one: the other leaves with 0, and not after torch's 300 s."""
    with two_nodes(scene, nodes=nodes, restarts=restarts) as (first, second):
        if status < 0:
            worker = scene.pid(1)
            second.signal(signal.SIGKILL)
            os.kill(worker, signal.SIGKILL)
        _ends(scene, first, 0)
        if status > 0:
            scene.leave(1, status)
        assert (first.wait(), second.wait()) == (0, status)
