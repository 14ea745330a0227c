"""What is done to each of the trainings: one function for each, which comes back when the training
has ended. The tests look at what it has left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from clusters import Part, preempt
from integration.manyranks.rankstraining import RanksTraining

COLLECTIVE_TIMEOUT_S = 3
SUSPENDED_S = 10 * COLLECTIVE_TIMEOUT_S
WORLDS = (3, 2, 3)
COMPARABLE = ("--dropout=0", "--no-batch-norm")
"""What makes a training the same on any number of ranks, up to rounding."""
SHORT = ("--epochs=3",)
PREEMPTED = slice(0, 3)
"""The nodes of the part that are preempted."""
SHARED = slice(4, 8)
"""The nodes of jobs that nobody preempts."""


@dataclass
class Story:
    """A training that has ended, and what was seen on the way."""

    training: RanksTraining
    seen: dict[str, list[str]] = field(default_factory=dict)


def ddp(cluster: Part, folder: Path) -> Story:
    """Suspended past SIGSTOP and preempted; the next attempt is suspended for ten times the
    time-out of its collectives."""
    nodes = cluster.nodes[PREEMPTED]
    options = (f"--collective-timeout-s={COLLECTIVE_TIMEOUT_S}", *SHORT)
    training = RanksTraining(cluster, folder, options=options, world=3, nodes=3)
    training.submit(f"--nodelist={','.join(nodes)}")
    training.wait_for_ranks(1)
    training.wait_for_step(23)
    training.suspend(1, until_stopped=True)
    preempt(cluster, nodes)
    training.wait_for_ranks(2)
    training.suspend(2, until_stopped=True, meanwhile=lambda: time.sleep(SUSPENDED_S))
    training.wait_for_end()
    return Story(training)


def worlds(cluster: Part, folder: Path) -> Story:
    """Requeued by hand, and then because the slurmd of a node is gone; each time given another
    number of nodes while it waits."""
    training = RanksTraining(cluster, folder, options=COMPARABLE, think_s=0.01, nodes=WORLDS[0])
    training.submit(f"--exclude={','.join((*cluster.nodes[PREEMPTED], *cluster.nodes[SHARED]))}")
    story = Story(training)
    for attempt, end in enumerate((training.requeue, lambda: _lose_a_node(story)), start=1):
        training.world = WORLDS[attempt - 1]
        training.wait_for_ranks(attempt)
        training.wait_for_step(50 * attempt)
        end()
        _wait_until_it_waits(training, attempt)
        size = f"NumNodes={WORLDS[attempt]}"
        training.slurm("scontrol", "update", f"JobId={training.job_id}", size)
    training.world = WORLDS[-1]
    training.wait_for_ranks(len(WORLDS))
    story.seen["nodes"] = _nodes_of(training)
    training.wait_for_end()
    return story


ACTS: dict[str, Callable[[Part, Path], Story]] = {"ddp": ddp, "worlds": worlds}
"""Those on the nodes of one part, in the order in which they begin."""


def _lose_a_node(story: Story) -> None:
    """Kill the slurmd of the second rank's node; after a while Slurm would take it for dead."""
    lost = _nodes_of(story.training)[1]
    story.seen["lost"] = [lost]
    daemons = {one.name: one.pid for one in story.training.cluster.status().daemons}
    os.kill(daemons[f"slurmd-{lost}"], signal.SIGKILL)
    why = ("State=DOWN", "Reason=slurmd is dead")
    story.training.slurm("scontrol", "update", f"NodeName={lost}", *why)


def _wait_until_it_waits(training: RanksTraining, attempt: int) -> None:
    """Until the job is back in the queue, where it can be changed."""

    def waits() -> bool:
        state = training.slurm("squeue", "-h", "-j", training.job_id, "-t", "all", "-o", "%T")
        return state.startswith("PENDING") and training.attempts()[attempt - 1].ending is not None

    training.wait_until(waits, "the job to wait in the queue")


def _nodes_of(training: RanksTraining) -> list[str]:
    """srun's task N is on the Nth."""
    names = training.slurm("squeue", "-h", "-j", training.job_id, "-o", "%N")
    return training.slurm("scontrol", "show", "hostnames", names).splitlines()
