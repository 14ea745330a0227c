"""A real Slurm leaves at least as long as the policy says, and tells why, for each kind of stop:
from the first signal that a stubborn job step got to the last sign of life that it gave."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from clusters import Part
from processes import wait_until
from slurm.victims import Victim, preempt

from hydroslurm.core.jobid import JobId
from hydroslurm.devcluster import DevCluster
from hydroslurm.slurm.client import SlurmClient, open_client
from hydroslurm.slurm.policy import Policies, PreemptAction, SitePolicy, StopReason
from hydroslurm.slurm.stops import IN_GRACE, Stop, ask_why
from hydroslurm.slurm.values import JobState

pytestmark = pytest.mark.slurm

# the task writes a sign of life each 20 ms; a busy machine may be late with one
LATE_S = 0.2
Limited = tuple[Victim, "Future[list[tuple[Stop, float]]]"]
LOOKS_EVERY_S = 30
"""How often slurmctld looks for jobs whose time limit is near or over."""


@pytest.fixture
def victims() -> Iterator[list[Victim]]:
    """Put a victim in, and it is ended after the test."""
    started: list[Victim] = []
    yield started
    for victim in started:
        victim.end()


def _client(cluster: DevCluster) -> SlurmClient:
    return open_client(environ=cluster.child_environ(), retry_policy=IN_GRACE)


def _policy(victim: Victim) -> SitePolicy:
    client = _client(victim.cluster)
    policies = Policies.read(client)
    assert policies is not None
    policy = policies.of(client.job(victim.id))
    assert policy is not None
    return policy


def _ask(victim: Victim, *, after: str = "SIGTERM", limit_s: float = 60.0) -> tuple[Stop, float]:
    """Why it was told to stop, as asked when it was told, and that moment."""
    told_at = victim.wait_for(after, limit_s=limit_s)
    # accounting learns of a cancel late on a busy machine
    return ask_why(_client(victim.cluster), victim.id, history_within_s=limit_s), told_at


def _check(victim: Victim, stop: Stop, told_at: float) -> float:
    """It lived at least as long as it was told; how long that was."""
    policy = _policy(victim)
    left_s = stop.time_left_s(policy.kill_after_s)
    lived_s = victim.wait_for_kill(limit_s=90) - told_at
    assert lived_s >= left_s - LATE_S, f"{lived_s} s, not {left_s}"
    # a bound of zero would hold always
    assert left_s >= policy.kill_after_s - 1
    return lived_s


@pytest.fixture(scope="module")
def limited(requeue_cluster: Part, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    """Is under way while other tests wait for other things."""
    cluster, folder = requeue_cluster, tmp_path_factory.mktemp("limited") / "job"
    options = ("-t5", "--signal=URG@10")
    victim = Victim(cluster, folder, *options, node=cluster.nodes[1], cpus=1)

    def to_its_limit() -> list[tuple[Stop, float]]:
        victim.wait_for("ready")
        # slurmctld warns when it looks the next time, and ends it when it does the time after that
        end = time.strftime("%FT%T", time.localtime(time.time() + LOOKS_EVERY_S + 2))
        cluster.run(["scontrol", "update", f"JobId={victim.id}", f"EndTime={end}"])
        return [_ask(victim, after=signal, limit_s=90) for signal in ("SIGURG", "SIGTERM")]

    with ThreadPoolExecutor(1) as pool:
        yield victim, pool.submit(to_its_limit)
    victim.end()


def test_grace(
    requeue_cluster: Part, tmp_path: Path, victims: list[Victim], limited: Limited
) -> None:
    """A preemption with grace leaves GraceTime and KillWait. A job may requeue itself inside its
    grace."""
    cluster, node = requeue_cluster, requeue_cluster.nodes[0]
    stubborn = Victim(cluster, tmp_path / "a", node=node, cpus=4)
    clever = Victim(cluster, tmp_path / "c", node=node, cpus=4, requeues_itself=True)
    victims += [stubborn, clever]
    for victim in victims:
        victim.wait_for("ready")
    preempt(cluster, node=node)
    stop, told_at = _ask(stubborn)
    assert (stop.reason, stop.pending_again) == (StopReason.PREEMPTED, False)
    # asked from inside the job step, in its grace
    clever.wait_for("requeue-ended-0")
    job = _client(cluster).job(clever.id)
    assert job.restart_count == 1
    assert job.state in (JobState.COMPLETING, JobState.PENDING)
    planned = _policy(stubborn).time_left(StopReason.PREEMPTED)
    assert _check(stubborn, stop, told_at) >= planned.seconds - LATE_S
    assert planned.seconds > cluster.spec.grace_s


def test_gang(gang_requeue_cluster: Part, tmp_path: Path, victims: list[Victim]) -> None:
    """Gang scheduling requeues at once, whatever GraceTime says, and KillWait is what there is.
    Accounting knows that it was a preemption, which makes no difference to what follows."""
    cluster, (node,) = gang_requeue_cluster, gang_requeue_cluster.nodes
    victim = Victim(cluster, tmp_path / "a", node=node, cpus=cluster.spec.cpus_per_node)
    victims.append(victim)
    victim.wait_for("ready")
    preempt(cluster, node=node)
    stop, told_at = _ask(victim)
    assert (stop.reason, stop.pending_again) == (StopReason.REQUEUED, True)
    assert stop.message == "requeued, by hand or by a preemption"
    client = _client(cluster)
    wait_until(
        lambda: client.history(JobId(victim.id))[0].state is JobState.PREEMPTED, "its record"
    )
    policy = _policy(victim)
    assert (policy.action, policy.gang) == (PreemptAction.REQUEUE, True)
    assert policy.grace_s == cluster.spec.grace_s
    lived_s = _check(victim, stop, told_at)
    assert lived_s < policy.kill_wait_s + policy.grace_s, "the grace was given after all"


def test_by_a_person(pause_cluster: Part, tmp_path: Path, victims: list[Victim]) -> None:
    """scancel, scontrol requeue and a signal are told apart; the first two leave KillWait, and who
    cancelled is known. A pause is all that a preemption does here."""
    ways = (["scancel"], ["scontrol", "requeue"], ["scancel", "--signal=TERM"])
    for number, node in enumerate(pause_cluster.nodes):
        victims.append(Victim(pause_cluster, tmp_path / str(number), node=node, cpus=1))
    for victim in victims:
        victim.wait_for("ready")
    stops = []
    for way, victim in zip(ways, victims, strict=True):
        pause_cluster.run([*way, str(victim.id)])
        # as a rank asks, while it lives: of a job that has ended slurmctld's answer is enough
        stops.append(_ask(victim))
    reasons = [StopReason.CANCELLED, StopReason.REQUEUED, StopReason.ASKED]
    assert [stop.reason for stop, _ in stops] == reasons
    assert stops[0][0].message == f"cancelled by user id {os.getuid()}"
    assert [stop.pending_again for stop, _ in stops] == [False, True, False]
    for victim, told in zip(victims[:2], stops[:2], strict=True):
        _check(victim, *told)
    asked = victims[2]
    assert _client(pause_cluster).job(asked.id).state is JobState.RUNNING
    assert _policy(asked).action is PreemptAction.PAUSE


def test_time_limit(limited: Limited) -> None:
    """A warning leaves the rest of the time limit and KillWait; the time limit itself KillWait."""
    victim, asked = limited
    (warned, warned_at), (over, over_at) = asked.result(200)
    assert warned.reason is StopReason.TIME_LIMIT
    assert (warned.to_end_s or 0.0) > 0.0
    assert (over.reason, over.to_end_s) == (StopReason.TIME_LIMIT, 0.0)
    _check(victim, warned, warned_at)
    _check(victim, over, over_at)
