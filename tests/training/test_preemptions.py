"""A training that is stopped again and again by gang scheduling and at its time limit ends with the
bits of one that nobody stops. Preemption with grace and requeues by hand: integration/manyranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import Part
from stories import Stories, stories
from training.trainings import Training, steps_lost, trained_alone

from hydroslurm.core.events import EventKind

pytestmark = pytest.mark.slurm

EPOCHS = 6  # of 90 steps
STOPS = 2
SEED = 20261121


@pytest.fixture(scope="module")
def trainings(
    requeue_cluster: Part,
    gang_requeue_cluster: Part,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stories[Training]]:
    """Way -> the training that was stopped so, done."""

    def told(
        cluster: Part, drive: Callable[[Training, str], None], *options: str, think_s: float
    ) -> Callable[[Path], Training]:
        def tell(folder: Path) -> Training:
            training = Training(cluster, folder, EPOCHS, think_s)
            training.submit(f"--nodelist={cluster.nodes[0]}", *options)
            drive(training, cluster.nodes[0])
            training.wait_for_end()
            return training

        return tell

    limit = ("--time=1", "--signal=URG@40")
    ways = {
        "gang": told(gang_requeue_cluster, preempt, "--partition=gang", think_s=0.02),
        # so slow that attempts of up to half a minute do not finish it
        "limit": told(requeue_cluster, wait_for_warnings, *limit, think_s=0.15),
    }
    base = tmp_path_factory.mktemp("preempted")
    clusters = (requeue_cluster, gang_requeue_cluster)
    with stories(ways, base, clusters=clusters, at_a_time=len(ways)) as under_way:
        yield under_way


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the run that nobody stops."""
    return trained_alone(tmp_path_factory.mktemp("alone"), epochs=EPOCHS)


def preempt(training: Training, node: str) -> None:
    """An urgent job for the whole node, again and again, at random steps."""
    moments = sorted(random.Random(SEED).sample(range(5, 450), STOPS))
    for attempt, step in enumerate(moments, start=1):
        training.wait_for_attempt(attempt)
        training.wait_for_step(step)
        urgent = ("--partition=urgent", "--nodes=1", f"--nodelist={node}", "--exclusive")
        training.slurm("srun", *urgent, "--time=1", "true")


def wait_for_warnings(training: Training, node: str) -> None:
    """The time limit of one minute comes by itself; when it has often enough, an operator lifts
    it."""
    for attempt in range(2, STOPS + 2):  # each has a limit of its own to come
        training.wait_for_attempt(attempt)
    training.slurm("scontrol", "update", f"JobId={training.job_id}", "TimeLimit=60")


WAYS = {"gang": {"preempted", "requeued"}, "limit": {"time_limit"}}


@pytest.mark.parametrize("way", WAYS)
def test_stopped_again_and_again_it_ends_with_the_same_bits(
    way: str, trainings: Stories[Training], alone: dict[str, Any]
) -> None:
    """Weights, optimizer state and the loss of every step are those of the run that nobody stops;
    every sample of every epoch was seen exactly once; no step was lost or trained twice."""
    training = trainings.result(way, 600.0)
    attempts = training.attempts()
    endings = Counter(attempt.ending for attempt in attempts)
    assert sum(endings[ending] for ending in WAYS[way]) >= STOPS, training.log()
    assert endings["finished"] == 1
    assert steps_lost(attempts) == 0, attempts
    # no signal was lost, and none is said to be
    ends = [one for one in training.events() if one.kind is EventKind.UNINSTALLED]
    assert {one.data["handlers_replaced_by_others"] for one in ends} == {0}
    result = training.wait_for_end()
    assert result == alone
    assert result["every_sample_once"]
