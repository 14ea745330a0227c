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
SUSPENDED_S = 5.0


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@contextlib.contextmanager
def two_nodes(scene: Scene, *, stock: bool = False) -> Iterator[tuple[Child, Child]]:
    """Two agents with one worker each, which have announced themselves."""
    options = (
        "--nnodes=2",
        "--nproc-per-node=1",
        "--max-restarts=2",
        "--local-addr=127.0.0.1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=two-nodes",
        f"--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt={KEEP_ALIVE_S},join_timeout=6",
    )
    with (
        scene.agent(*options, name="a", stock=stock) as a,
        scene.agent(*options, name="b", stock=stock) as b,
    ):
        for rank in range(2):
            scene.wait_told(rank, "announced")
        yield a, b


def suspend(pids: list[int]) -> None:
    """What slurmd does to a job behind the SIGTSTP, for longer than the keep-alive."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(SUSPENDED_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("announced", [True, False])
def test_a_suspend_longer_than_the_keep_alive(scene: Scene, announced: bool) -> None:
    """The workers go on in the same processes, and one that fails later is started again, with its
    peer on the other node; also where no SIGTSTP comes before."""
    with two_nodes(scene) as agents:
        before = scene.pids()
        for agent in agents if announced else ():
            agent.signal(signal.SIGTSTP)
        for node in range(2) if announced else ():
            scene.wait_state("slurm_pause", "parked", node=node)
        suspend([*before, *(agent.pid for agent in agents)])
        for node in range(2):
            scene.wait_state("slurm_resume", "running", node=node)
        # the heartbeats that follow are what would find the nodes dead
        time.sleep(KEEP_ALIVE_S)
        assert scene.pids() == before
        scene.leave(0, 3)
        for rank in range(2):
            scene.wait_told(rank, "announced", times=2)
        assert scene.attempts(0) == scene.attempts(1)
        assert len(set(scene.attempts(0))) == 2
        for rank in range(2):
            scene.leave(rank, 0)
        assert [agent.wait() for agent in agents] == [0, 0]


def test_stock_torchrun_forgets_its_nodes(scene: Scene) -> None:
    """For the record, and so that we hear of it when torch mends it: after such a suspend the
    workers go on, but the failure of one ends the job, although restarts are left."""
    with two_nodes(scene, stock=True) as agents:
        before = scene.pids()
        suspend([*before, *(agent.pid for agent in agents)])
        time.sleep(KEEP_ALIVE_S)
        assert scene.pids() == before
        scene.leave(0, 3)
        wait_until(lambda: any(a.process.poll() is not None for a in agents), "an agent gives up")
        assert [scene.told(rank).count("announced") for rank in range(2)] == [1, 1]
        assert any("RendezvousTimeoutError" in str(agent) for agent in agents)


def test_a_node_that_goes_first_takes_no_other_with_it(scene: Scene) -> None:
    """The agent with the store is lost while the other node's worker has yet to hear of a stop:
    that one saves undisturbed, and its node leaves with its status."""
    with two_nodes(scene) as (first, second):
        with_store = next(a for a in (first, second) if _has_children(a.pid, scene.pid(0)))
        other = second if with_store is first else first
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
    with two_nodes(scene) as agents:
        mine = next(agent for agent in agents if _has_children(agent.pid, scene.pid(0)))
        worker = scene.pid(0)
        scene.leave(0, 0)
        wait_until(lambda: not _has_children(mine.pid, worker), "the agent has seen it end")
        mine.signal(signal.SIGTERM)
        assert mine.wait() == 0


def _has_children(pid: int, child: int) -> bool:
    return child in list(proc.family(pid))
