"""The promise, on a real Slurm: a training that is stopped again and again, in every way, ends with
the bits of one that was left alone.

Four trainings run side by side, each stopped at least five times in its own way; nearly all of the
time is Slurm's own waiting, so that they hardly disturb each other.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import is_stopped, wait_until
from stories import Stories, stories
from training.trainings import Training, steps_lost, trained_alone

from hydroslurm.core.events import EventKind
from hydroslurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm

EPOCHS = 15  # of 90 steps
STOPS = 5
SEED = 20261121


@pytest.fixture(scope="module")
def trainings(
    requeue_cluster: DevCluster,
    gang_requeue_cluster: DevCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stories[Training]]:
    """Way -> the training that was stopped so, done."""

    def told(
        cluster: DevCluster, drive: Callable[[Training], None], *opts: str, think_s: float = 0.02
    ) -> Callable[[Path], Training]:
        def tell(folder: Path) -> Training:
            training = Training(cluster, folder, EPOCHS, think_s).submit(*opts)
            drive(training)
            training.wait_for_end()
            return training

        return tell

    limit = ("--nodelist=n2", "--time=1", "--signal=URG@40")
    ways = {
        "grace": told(requeue_cluster, preempt, "--nodelist=n1"),
        "gang": told(gang_requeue_cluster, preempt, "--nodelist=n1"),
        "requeue": told(requeue_cluster, requeue_by_hand, "--nodelist=n2"),
        # so slow that five attempts of up to half a minute do not finish it
        "limit": told(requeue_cluster, wait_for_warnings, *limit, think_s=0.12),
    }
    base = tmp_path_factory.mktemp("preempted")
    clusters = (requeue_cluster, gang_requeue_cluster)
    with stories(ways, base, clusters=clusters, at_a_time=len(ways)) as under_way:
        yield under_way


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the run that was left alone."""
    return trained_alone(tmp_path_factory.mktemp("alone"), epochs=EPOCHS)


def moments(seed: int) -> list[int]:
    """The steps at which a training is stopped, anywhere in it but its end."""
    return sorted(random.Random(seed).sample(range(5, 1200), STOPS))


def preempt(training: Training) -> None:
    """An urgent job for the whole node, again and again, at random steps."""
    for attempt, step in enumerate(moments(SEED), start=1):
        training.wait_for_attempt(attempt)
        training.wait_for_step(step)
        urgent = ("--partition=urgent", "--nodes=1", "--nodelist=n1", "--exclusive", "--time=1")
        training.slurm("srun", *urgent, "true")


def requeue_by_hand(training: Training) -> None:
    """scontrol requeue by an operator, with suspends mixed in."""
    for attempt, step in enumerate(moments(SEED + 1), start=1):
        training.wait_for_attempt(attempt)
        training.wait_for_step(step)
        training.slurm("scontrol", "suspend", training.job_id)
        training.wait_for_suspend(attempt)
        if attempt % 2:  # long enough to be stopped by SIGSTOP as well, which comes after 2 s
            pid = training.events()[-1].pid
            wait_until(lambda pid=pid: is_stopped(pid), "SIGSTOP")
        training.slurm("scontrol", "resume", training.job_id)
        # within the two seconds before SIGSTOP Slurm only notes a resume, and a requeue that comes
        # then kills the job step without a word: a suspended one gets no signal
        training.wait_for_pauses(attempt, number=1)
        training.slurm("scontrol", "requeue", training.job_id)


def wait_for_warnings(training: Training) -> None:
    """The time limit of one minute comes by itself; when it has often enough, an operator lifts
    it."""
    for attempt in range(2, STOPS + 2):  # each has a limit of its own to come
        training.wait_for_attempt(attempt)
    training.slurm("scontrol", "update", f"JobId={training.job_id}", "TimeLimit=60")


WAYS = {
    "grace": {"preempted"},
    "gang": {"preempted", "requeued"},
    "requeue": {"requeued"},
    "limit": {"time_limit"},
}


@pytest.mark.parametrize("way", WAYS)
def test_stopped_again_and_again_it_ends_with_the_same_bits(
    way: str, trainings: Stories[Training], alone: dict[str, Any]
) -> None:
    """Weights, optimizer state and the loss of every step are those of the run left alone; every
    sample of every epoch was seen exactly once; no step was lost or trained twice."""
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
