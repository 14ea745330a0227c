"""What is done to each of the trainings: one function for each, which comes back when the training
has ended. The tests look at what it has left behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from integration.manyranks.rankstraining import AGENT, FSDP, RanksTraining

from hydroslurm.core.events import EventKind
from hydroslurm.devcluster import DevCluster

PREEMPTIONS = {"ddp": 5, "fsdp": 5 if os.environ.get("HYDROSLURM_ALL_STOPS") else 3}
"""How often each is suspended and preempted. Loading torch for four ranks takes a machine with two
cores 20 s: `HYDROSLURM_ALL_STOPS=1 make test ARGS=tests/integration/manyranks` does all."""
SEED = 20261121
COLLECTIVE_TIMEOUT_S = 3
SUSPENDED_S = 10 * COLLECTIVE_TIMEOUT_S
WORLDS = (4, 2, 3, 4)
COMPARABLE = ("--dropout=0", "--no-batch-norm")
"""What makes a training the same on any number of ranks, up to rounding."""
OTHERS = "n[9-12]"
"""The nodes of those whose nodes nobody else wants; they have room for four jobs of one processor
each."""
SPARE = "n[13-19]"
"""For the four ranks of the job that loses one; it may be told three times."""


@dataclass
class Story:
    """A training that has ended, and what was seen on the way."""

    training: RanksTraining
    seen: dict[str, list[str]] = field(default_factory=dict)


def preempted(
    cluster: DevCluster, folder: Path, *, command: str, first_node: int, times: int
) -> Story:
    """Suspended and preempted in turn, so often, at random steps."""
    nodes = [f"n{number}" for number in range(first_node, first_node + 4)]
    training = RanksTraining(cluster, folder, command=command)
    training.submit(f"--nodelist={','.join(nodes)}")
    moments = sorted(random.Random(SEED + first_node).sample(range(5, 290), 2 * times))
    for attempt, (pause, stop) in enumerate(zip(moments[::2], moments[1::2], strict=True), start=1):
        training.wait_for_ranks(attempt)
        training.wait_for_step(pause)
        training.suspend(attempt, until_stopped=attempt % 2 == 1)
        training.wait_for_step(stop)
        training.preempt(nodes)
    training.wait_for_end()
    return Story(training)


def ddp(cluster: DevCluster, folder: Path) -> Story:
    return preempted(
        cluster, folder, command=RanksTraining.command, first_node=1, times=PREEMPTIONS["ddp"]
    )


def fsdp(cluster: DevCluster, folder: Path) -> Story:
    return preempted(cluster, folder, command=FSDP, first_node=5, times=PREEMPTIONS["fsdp"])


def worlds(cluster: DevCluster, folder: Path) -> Story:
    """Requeued three times, and each time given another number of nodes while it waits."""
    training = RanksTraining(cluster, folder, options=COMPARABLE, think_s=0.01)
    training.submit(f"--exclude=n[1-8],{SPARE}")
    for attempt, world in enumerate(WORLDS, start=1):
        training.world = world
        training.wait_for_ranks(attempt)
        if attempt < len(WORLDS):
            training.wait_for_step(50 * attempt)
            training.requeue()
            _wait_until_it_waits(training, attempt)
            size = f"NumNodes={WORLDS[attempt]}"
            training.slurm("scontrol", "update", f"JobId={training.job_id}", size)
    training.wait_for_end()
    return Story(training)


def long_suspend(cluster: DevCluster, folder: Path, *, command: str) -> Story:
    """Suspended for ten times the time-out of its collectives."""
    options = (f"--collective-timeout-s={COLLECTIVE_TIMEOUT_S}",)
    training = RanksTraining(cluster, folder, command=command, epochs=1, options=options)
    training.submit(f"--nodelist={OTHERS}")
    training.wait_for_ranks(1)
    training.wait_for_step(10)
    training.suspend(1, until_stopped=True, meanwhile=lambda: time.sleep(SUSPENDED_S))
    training.wait_for_end()
    return Story(training)


def long_ddp(cluster: DevCluster, folder: Path) -> Story:
    return long_suspend(cluster, folder, command=RanksTraining.command)


def long_fsdp(cluster: DevCluster, folder: Path) -> Story:
    return long_suspend(cluster, folder, command=FSDP)


def agent(cluster: DevCluster, folder: Path, *, nodes: str = "n[9-10]") -> Story:
    """Four ranks below the agents of two nodes: suspended past SIGSTOP, resumed, requeued."""
    training = RanksTraining(cluster, folder, command=AGENT, nodes=2)
    training.submit(f"--nodelist={nodes}")
    training.wait_for_ranks(1)
    training.wait_for_step(20)
    training.suspend(1, until_stopped=True)
    training.requeue()
    training.wait_for_ranks(2)
    training.wait_for_end()
    return Story(training)


def mixed(cluster: DevCluster, folder: Path) -> Story:
    """Four attempts, each ended by what reaches some of its ranks only, and a fifth to the end."""
    training = RanksTraining(cluster, folder)
    training.submit(f"--exclude=n[1-8],{OTHERS}")
    story = Story(training)
    # 1: one of the tasks is signalled
    training.wait_for_ranks(1)
    training.wait_for_step(20)
    training.signal(2, signal.SIGTERM, attempt=1)
    # 2: one of the tasks is paused, which parks all; the job is requeued then
    training.wait_for_ranks(2)
    training.wait_for_steps(10)
    training.signal(1, signal.SIGUSR1, attempt=2)
    for rank in range(4):
        training.wait_for(rank, EventKind.ALL_PARKED, attempt=2)
    training.requeue()
    # 3: a rank dies while the others are on their way to the place where they stop
    training.wait_for_ranks(3)
    training.wait_for_steps(70)  # more than EVERY_STEPS: so that this attempt has saved
    training.signal(3, signal.SIGSTOP, attempt=3)
    training.signal(1, signal.SIGTERM, attempt=3)
    training.wait_for(1, EventKind.STOP_REQUESTED, attempt=3)
    training.signal(3, signal.SIGKILL, attempt=3)
    _go_on(training, attempt=4)
    # 4: the slurmd of a node is gone; after a while Slurm would take the node for dead
    training.wait_for_ranks(4)
    training.wait_for_steps(10)
    lost = _node_of(training, rank=2)
    daemons = {daemon.name: daemon.pid for daemon in cluster.status().daemons}
    os.kill(daemons[f"slurmd-{lost}"], signal.SIGKILL)
    training.slurm("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=slurmd is dead")
    training.wait_for_ranks(5)
    story.seen["nodes"] = [_node_of(training, rank=rank) for rank in range(4)]
    story.seen["lost"] = [lost]
    training.wait_for_end()
    return story


ACTS: dict[str, Callable[[DevCluster, Path], Story]] = {
    "fsdp": fsdp,
    "ddp": ddp,
    "agent": agent,
    "worlds": worlds,
    "long_ddp": long_ddp,
    "long_fsdp": long_fsdp,
    "mixed": mixed,
}
"""In the order in which they begin: two that take long, and beside them one after the other in the
order of the tests."""


def _wait_until_it_waits(training: RanksTraining, attempt: int) -> None:
    """Until the job is back in the queue, where it can be changed."""

    def waits() -> bool:
        state = training.slurm("squeue", "-h", "-j", training.job_id, "-t", "all", "-o", "%T")
        return state.startswith("PENDING") and training.attempts()[attempt - 1].ending is not None

    training.wait_until(waits, "the job to wait in the queue")


def _go_on(training: RanksTraining, *, attempt: int) -> None:
    """After the death of a rank: as a person does it, where the job was not requeued by itself."""

    def state() -> str:
        command = ("squeue", "-h", "-j", training.job_id, "-t", "all", "-o", "%T")
        return training.slurm(*command, check=False)

    def decided() -> bool:
        return state() == "FAILED" or bool(training.events_of(0, attempt=attempt))

    training.wait_until(decided, "the job to fail or to be requeued")
    if not training.events_of(0, attempt=attempt):
        training.requeue()


def _node_of(training: RanksTraining, *, rank: int) -> str:
    """srun's task N is on the Nth node of the job."""
    names = training.slurm("squeue", "-h", "-j", training.job_id, "-o", "%N")
    listed = training.slurm("scontrol", "show", "hostnames", names)
    return listed.splitlines()[rank]
