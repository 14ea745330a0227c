"""A real Slurm leaves at least as long as the policy says, and tells why, for each kind of stop:
from the first signal that a stubborn job step got to the last sign of attempt that it gave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import Part
from processes import wait_until
from slurm.victims import Victim, preempt

from hydroslurm.core.jobid import JobId
from hydroslurm.devcluster import DevCluster
from hydroslurm.slurm.client import SlurmClient, open_client
from hydroslurm.slurm.policy import Policies, PreemptAction, SitePolicy, StopKind
from hydroslurm.slurm.stops import IN_GRACE, Stop, StopReason, ask_why
from hydroslurm.slurm.values import JobState

pytestmark = pytest.mark.slurm

# the task writes a sign of attempt each 20 ms; a busy machine may be late with one
LATE_S = 0.2


@pytest.fixture
def victims() -> Iterator[list[Victim]]:
    """Put a victim in, and it is ended after the test."""
    started: list[Victim] = []
    yield started
    for victim in started:
        victim.end()


def _client(cluster: DevCluster) -> SlurmClient:
    return open_client(environ=cluster.child_environ(), retry_policy=IN_GRACE)


def _policy(cluster: DevCluster, job_id: int) -> SitePolicy:
    client = _client(cluster)
    policy = Policies.read(client).of(client.job(job_id))
    assert policy is not None
    return policy


def _ask(victim: Victim, *, after: str = "SIGTERM", limit_s: float = 60.0) -> tuple[Stop, float]:
    """Why it was told to stop, as asked when it was told, and that moment."""
    told_at = victim.wait_for(after, limit_s=limit_s)
    return ask_why(_client(victim.cluster), victim.id), told_at


def _check(victim: Victim, stop: Stop, told_at: float, *, limit_s: float = 90.0) -> None:
    policy = _policy(victim.cluster, victim.id)
    left_s = stop.time_left_s(policy.kill_after_s)
    lived_s = victim.wait_for_kill(limit_s=limit_s) - told_at
    assert lived_s >= left_s - LATE_S, f"{lived_s} s, not {left_s}"
    # a bound of zero would hold always
    assert left_s >= policy.kill_after_s - 1


def test_grace_and_time_limit(requeue_cluster: Part, tmp_path: Path, victims: list[Victim]) -> None:
    """A preemption with grace leaves GraceTime and KillWait; a warning the rest of the time limit
    and KillWait; the time limit itself KillWait. A job may requeue itself inside its grace."""
    cluster = requeue_cluster
    limited = Victim(
        cluster, tmp_path / "b", "-t1", "--signal=URG@10", node=cluster.nodes[1], cpus=1
    )
    stubborn = Victim(cluster, tmp_path / "a", node=cluster.nodes[0], cpus=4)
    clever = Victim(cluster, tmp_path / "c", node=cluster.nodes[0], cpus=4, requeues_itself=True)
    victims += [limited, stubborn, clever]
    for victim in (stubborn, clever, limited):
        victim.wait_for("ready")
    preempt(cluster, node=cluster.nodes[0])
    stop, told_at = _ask(stubborn)
    assert stop.reason is StopReason.PREEMPTED
    assert not stop.pending_again
    # asked from inside the job step, in its grace
    clever.wait_for("requeue-ended-0")
    job = _client(cluster).job(clever.id)
    assert job.restart_count == 1
    assert job.state in (JobState.COMPLETING, JobState.PENDING)
    _check(stubborn, stop, told_at)
    policy = _policy(cluster, stubborn.id)
    planned = policy.time_left(StopKind.PREEMPTED)
    assert stubborn.wait_for_kill() - told_at >= planned.seconds - LATE_S
    assert planned.seconds > cluster.spec.grace_s

    warned, warned_at = _ask(limited, after="SIGURG", limit_s=90)
    assert warned.reason is StopReason.TIME_LIMIT
    assert (warned.to_end_s or 0.0) > 0.0
    over, over_at = _ask(limited, limit_s=150)
    assert (over.reason, over.to_end_s) == (StopReason.TIME_LIMIT, 0.0)
    _check(limited, warned, warned_at)
    _check(limited, over, over_at)


def test_gang(gang_requeue_cluster: Part, tmp_path: Path, victims: list[Victim]) -> None:
    """Gang scheduling requeues at once, whatever GraceTime says, and KillWait is what there is.
    Accounting knows that it was a preemption, which makes no difference to what follows."""
    cluster = gang_requeue_cluster
    victims.append(
        Victim(cluster, tmp_path / "a", node=cluster.nodes[0], cpus=cluster.spec.cpus_per_node)
    )
    (victim,) = victims
    victim.wait_for("ready")
    preempt(cluster, node=cluster.nodes[0])
    stop, told_at = _ask(victim)
    assert (stop.reason, stop.pending_again) == (StopReason.REQUEUED, True)
    assert stop.message == "requeued, by hand or by a preemption"
    client = _client(cluster)
    wait_until(
        lambda: client.history(JobId(victim.id))[0].state is JobState.PREEMPTED, "its record"
    )
    policy = _policy(cluster, victim.id)
    assert (policy.action, policy.gang) == (PreemptAction.REQUEUE, True)
    assert policy.grace_s == cluster.spec.grace_s
    _check(victim, stop, told_at)
    lived_s = victim.wait_for_kill() - told_at
    assert lived_s < policy.kill_wait_s + policy.grace_s, "the grace was given after all"


def test_by_a_person(pause_cluster: Part, tmp_path: Path, victims: list[Victim]) -> None:
    """scancel, scontrol requeue and a signal are told apart; the first two leave KillWait, and who
    cancelled is known. A pause is all that a preemption does here."""
    kinds = ("cancel", "requeue", "signal")
    for kind, node in zip(kinds, pause_cluster.nodes, strict=True):
        victims.append(Victim(pause_cluster, tmp_path / kind, node=node, cpus=1))
    for victim in victims:
        victim.wait_for("ready")
    cancelled, requeued, asked = victims
    pause_cluster.run(["scancel", str(cancelled.id)])
    pause_cluster.run(["scontrol", "requeue", str(requeued.id)])
    pause_cluster.run(["scancel", "--signal=TERM", str(asked.id)])
    stops = [_ask(victim) for victim in victims]
    assert [stop.reason for stop, _ in stops] == [
        StopReason.CANCELLED,
        StopReason.REQUEUED,
        StopReason.ASKED,
    ]
    assert stops[0][0].message == f"cancelled by user id {os.getuid()}"
    assert [stop.pending_again for stop, _ in stops] == [False, True, False]
    _check(cancelled, *stops[0])
    _check(requeued, *stops[1])
    assert _client(pause_cluster).job(asked.id).state is JobState.RUNNING
    assert _policy(pause_cluster, asked.id).action is PreemptAction.PAUSE
