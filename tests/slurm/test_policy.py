"""What a site does to a preempted job, from settings made by hand."""

from __future__ import annotations

import pytest

from hydroslurm.errors import UsageError
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.listings import read_qoses
from hydroslurm.slurm.policy import (
    KILL_COMES_EARLY_S,
    PreemptAction,
    SitePolicy,
    StopReason,
    find_partition,
    site_policy,
)
from hydroslurm.slurm.values import Job, JobState, Partition, Qos

URGENT = Partition(name="urgent", priority_tier=10, nodes=("n1", "n2"))
REQUEUE = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "KillWait": "30 sec"}
GANG = {**REQUEUE, "PreemptMode": "GANG,SUSPEND"}
QOS = {**REQUEUE, "PreemptType": "preempt/qos"}


def _low(mode: str = "REQUEUE", *, grace_s: int = 0) -> Partition:
    return Partition(name="low", preempt_mode=mode, grace_time_s=grace_s, nodes=("n2", "n3"))


def _policy(
    settings: dict[str, str], low: Partition | None = None, job: Job | None = None
) -> SitePolicy:
    low = low or _low()
    return site_policy(Config(settings), low, partitions=(low, URGENT), job=job)


def _job(**values: bool | str) -> Job:
    return Job(job_id=1, state=JobState.RUNNING, partition="low", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "mode", "action"),
    [
        (REQUEUE, "REQUEUE", PreemptAction.REQUEUE),
        (REQUEUE, "CANCEL", PreemptAction.CANCEL),
        (REQUEUE, "OFF", PreemptAction.NEVER),
        (GANG, "GANG,SUSPEND", PreemptAction.PAUSE),
        (GANG, "REQUEUE", PreemptAction.REQUEUE),
        ({**REQUEUE, "PreemptMode": "OFF"}, "REQUEUE", PreemptAction.NEVER),
        ({}, "REQUEUE", PreemptAction.NEVER),
        ({**REQUEUE, "PreemptMode": "REQUEUE,WITHIN"}, "REQUEUE", PreemptAction.REQUEUE),
    ],
)
def test_the_partition_counts_before_the_cluster(
    settings: dict[str, str], mode: str, action: PreemptAction
) -> None:
    """With preempt/partition_prio the partition's mode holds, where there is preemption at all."""
    policy = _policy(settings, _low(mode))
    assert policy.action is action
    assert policy.action_why


def test_nobody_of_a_higher_tier() -> None:
    """A partition above which there is none on its nodes is never preempted, whatever its mode."""
    elsewhere = Partition(name="gpu", priority_tier=99, nodes=("n9",))
    policy = site_policy(
        Config(REQUEUE), URGENT, partitions=(_low(), URGENT, elsewhere), job=_job()
    )
    assert (policy.action, policy.preemptors) == (PreemptAction.NEVER, ())
    assert "higher PriorityTier" in policy.action_why
    assert _policy(REQUEUE).preemptors == ("urgent",)
    alone = site_policy(Config(REQUEUE), _low())
    assert (alone.action, alone.preemptors) == (PreemptAction.REQUEUE, None)


def test_by_qos() -> None:
    """With preempt/qos the QOS decides mode and grace, and the partition nothing."""
    qoses = (
        Qos(name="scavenger", grace_time_s=120, preempt_mode="CANCEL"),
        Qos(name="normal", grace_time_s=60),
        Qos(name="high", preempts=("scavenger", "normal")),
    )
    low = _low("OFF", grace_s=5)

    def policy(qos: str) -> SitePolicy:
        return site_policy(Config(QOS), low, qoses=qoses, job=_job(qos=qos))

    assert policy("scavenger").action is PreemptAction.CANCEL
    assert policy("scavenger").grace_s == 120
    assert (policy("normal").action, policy("normal").grace_s) == (PreemptAction.REQUEUE, 60)
    assert policy("normal").preemptors == ("high",)
    assert policy("high").action is PreemptAction.NEVER
    assert policy("other").unknown
    away = site_policy(Config(QOS), low, qos="normal", qoses=None)
    assert (away.action, away.grace_s) == (PreemptAction.REQUEUE, 0)
    assert "accounting could not be asked" in away.unknown[0]


BATCH = {"is_batch": True, "may_requeue": True}


@pytest.mark.parametrize(
    ("default", "job", "may", "why"),
    [
        ("1", None, True, "JobRequeue=1"),
        ("0", None, False, "JobRequeue=0"),
        ("0", BATCH, True, "Requeue=1"),
        ("1", {**BATCH, "may_requeue": False}, False, "--no-requeue"),
        ("1", {**BATCH, "is_batch": False}, False, "srun or salloc"),
    ],
)
def test_who_may_be_requeued(default: str, job: dict[str, bool], may: bool, why: str) -> None:
    """Batch jobs that were not submitted with --no-requeue; others are killed by a preemption."""
    policy = _policy({**REQUEUE, "JobRequeue": default}, job=_job(**job) if job else None)
    assert policy.may_requeue is may
    assert why in policy.requeue_why
    assert policy.action is (PreemptAction.REQUEUE if may else PreemptAction.CANCEL)


def test_time_left() -> None:
    """Each kind of stop has its bound, which rests on KillWait, GraceTime or the time limit."""
    policy = _policy(REQUEUE, _low(grace_s=60))
    kill_s = 30 - KILL_COMES_EARLY_S
    assert policy.kill_after_s == kill_s
    bounds = {
        StopReason.PREEMPTED: 59 + kill_s,
        StopReason.TIME_LIMIT: kill_s,
        StopReason.CANCELLED: kill_s,
        StopReason.REQUEUED: kill_s,
        StopReason.NODE_FAILING: 0,
    }
    for kind, seconds in bounds.items():
        left = policy.time_left(kind)
        assert left.seconds == seconds
        assert left.why
    warned = policy.time_left(StopReason.TIME_LIMIT, warning_s=90)
    assert warned.seconds == 90 + kill_s


def test_what_shortens_or_lengthens_it() -> None:
    """KillWait is all there is under gang scheduling, and the sentence says so; KillWait=1 is 5 to
    slurmd."""
    left = _policy(GANG, _low(grace_s=60)).time_left(StopReason.PREEMPTED)
    assert left.seconds == 30 - KILL_COMES_EARLY_S
    assert "ignores GraceTime=60 of partition low" in left.why
    policy = _policy({**REQUEUE, "KillWait": "1 sec"})
    assert (policy.kill_wait_s, policy.kill_after_s) == (5, 5 - KILL_COMES_EARLY_S)


def test_settings_of_slurm_conf() -> None:
    """What a site sets by words in a list, by minutes or by days is read; defaults are Slurm's."""
    plain = Config({})
    assert (plain.job_requeue, plain.send_user_signal, plain.gang) == (True, False, False)
    assert plain.requeue_wait_s == 121
    assert (plain.has_accounting, plain.appends_output) == (False, False)
    assert Config({"PreemptParameters": "a,send_user_signal"}).send_user_signal
    assert Config({"SlurmctldParameters": "preempt_send_user_signal"}).send_user_signal
    delay = {"SchedulerParameters": "x=1,requeue_delay=3"}
    assert Config({**delay, "SLURM_VERSION": "25.11.7"}).requeue_wait_s == 4
    assert Config({**delay, "SLURM_VERSION": "24.11.1"}).requeue_wait_s == 121
    cgroup = {"ProctrackType": "proctrack/cgroup"}
    assert not Config(cgroup).signals_children
    assert Config({**cgroup, "SignalChildrenProcesses": "yes"}).signals_children


@pytest.mark.parametrize(
    ("settings", "exempt_s"),
    [
        ({**REQUEUE, "PreemptExemptTime": "00:30:00"}, 1800),
        ({**REQUEUE, "PreemptExemptTime": "90"}, 90),  # pyslurm
        ({**REQUEUE, "PreemptExemptTime": ""}, 0),
        ({**GANG, "PreemptExemptTime": "00:30:00", "SLURM_VERSION": "25.11.7"}, 0),
        ({**GANG, "PreemptExemptTime": "00:30:00", "SLURM_VERSION": "26.05.5"}, 1800),
        ({**QOS, "PreemptExemptTime": "00:30:00"}, 60),
    ],
)
def test_how_long_a_start_is_safe(settings: dict[str, str], exempt_s: int) -> None:
    """The QOS counts before the cluster where QOS decide, and gang scheduling heeds it late."""
    qoses = (Qos(name="low", exempt_s=60), Qos(name="high", preempts=("low",)))
    policy = site_policy(Config(settings), _low(), qos="low", qoses=qoses)
    assert policy.exempt_s == exempt_s


def test_find_partition() -> None:
    """By name, the first of several, the default for none; an unknown one names those there are."""
    both = (Partition(name="low", is_default=True), URGENT)
    assert find_partition(both, "").name == "low"
    assert find_partition(both, "urgent,low").name == "urgent"
    with pytest.raises(UsageError, match=r"no partition 'x'.*low, urgent"):
        find_partition(both, "x")


def test_qoses_are_read() -> None:
    """ "cluster" is no mode of its own, GraceTime is a clock, Preempt a list."""
    output = "normal|00:00:00|cluster||\nhigh|00:02:00|requeue|normal,low|00:30:00\n"
    high = {"grace_time_s": 120, "preempt_mode": "REQUEUE", "exempt_s": 1800}
    preempts = ("normal", "low")
    assert read_qoses(output) == (Qos(name="normal"), Qos(name="high", preempts=preempts, **high))
