"""Why we were stopped, read out of what a real Slurm said while the rank still lived."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hydroslurm.core.exitcodes import CANCELLED, RUN_AGAIN
from hydroslurm.core.jobid import JobId
from hydroslurm.errors import ControllerUnreachable, NoSuchJob
from hydroslurm.slurm import scontrol_text
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.policy import Policies
from hydroslurm.slurm.stops import Stop, StopReason, ask_why, requeue, why_stopped
from hydroslurm.slurm.values import Job, JobState, Partition

RECORDED = Path(__file__).parent / "recorded/22.05/stops"
URGENT = Partition(name="urgent", priority_tier=10, nodes=("n1",))


def _job(name: str) -> Job:
    (job,) = scontrol_text.read_jobs((RECORDED / f"{name}.txt").read_text())
    return job


def _attempt(state: JobState, **values: int) -> Job:
    return Job(job_id=1, state=state, start_epoch_s=1795267000, **values)


def _why(name: str, *, attempt: Job | None = None, now_epoch_s: float = 1795267817.5) -> Stop:
    return why_stopped(_job(name), now_epoch_s=now_epoch_s, attempt=attempt)


def test_preempted_in_its_grace() -> None:
    """PreemptTime on a running job: preempted, and EndTime says how long the grace still is."""
    stop = _why("grace")
    assert stop.reason is StopReason.PREEMPTED
    assert stop.to_end_s == pytest.approx(5.5)
    assert not stop.needs_history


@pytest.mark.parametrize("name", ["grace_over", "no_grace", "gang", "requeued"])
def test_back_in_the_queue(name: str) -> None:
    """A requeue is seen from slurmctld alone, and that is enough; accounting would say whose."""
    stop = _why(name)
    assert (stop.reason, stop.pending_again) == (StopReason.REQUEUED, True)
    assert not stop.needs_history
    by_gang = _why(name, attempt=_attempt(JobState.PREEMPTED))
    assert (by_gang.reason, by_gang.pending_again) == (StopReason.PREEMPTED, True)
    by_hand = _why(name, attempt=_attempt(JobState.REQUEUED))
    assert (by_hand.reason, by_hand.message) == (StopReason.REQUEUED, "requeued by hand")
    assert not by_hand.needs_history
    by_failure = _why(name, attempt=_attempt(JobState.NODE_FAIL))
    assert by_failure.reason is StopReason.NODE_FAILING


def test_cancelled() -> None:
    """A job that is ended and not requeued counts as cancelled; accounting knows by whom."""
    stop = _why("cancelled")
    assert (stop.reason, stop.needs_history) == (StopReason.CANCELLED, True)
    assert "user id" not in stop.message
    known = _why("cancelled", attempt=_attempt(JobState.CANCELLED, cancelled_by_uid=1000))
    assert (known.reason, known.message) == (StopReason.CANCELLED, "cancelled by user id 1000")
    preempted = _why("cancelled", attempt=_attempt(JobState.PREEMPTED))
    assert (preempted.reason, preempted.pending_again) == (StopReason.PREEMPTED, False)


def test_cancelled_in_its_grace() -> None:
    """A person's scancel counts more than the preemption that came before it."""
    job = replace(_job("cancelled"), preempt_epoch_s=1795267860)
    assert why_stopped(job, now_epoch_s=1795267862).needs_history
    attempt = _attempt(JobState.CANCELLED, cancelled_by_uid=7)
    assert why_stopped(job, now_epoch_s=1795267862, attempt=attempt).reason is StopReason.CANCELLED


def test_clocks_that_differ_do_not_make_a_cancelled_job_a_requeued_one() -> None:
    """What tells them apart is a time limit's distance, not this machine's clock."""
    stop = _why("cancelled", now_epoch_s=1795267862 - 240)
    assert stop.reason is StopReason.CANCELLED


def test_time_limit() -> None:
    """Over: told by the reason. Near, on a running job: a warning, with the time to its end."""
    over = _why("time_limit")
    assert (over.reason, over.to_end_s) == (StopReason.TIME_LIMIT, 0.0)
    near = _why("warned", now_epoch_s=1795267993)
    assert (near.reason, near.to_end_s) == (StopReason.TIME_LIMIT, 50)


def test_time_limit_extended_meanwhile() -> None:
    """The same signal, with a limit that has been moved away since: nobody stops the job."""
    stop = _why("warned", now_epoch_s=1795267993 - 3600)
    assert stop.reason is StopReason.ASKED
    early = why_stopped(_job("warned"), now_epoch_s=1795267993 - 500, warning_s=600)
    assert early.reason is StopReason.TIME_LIMIT


def test_asked_by_a_person() -> None:
    """A running job with nothing wrong: somebody sent the signal."""
    stop = _why("asked")
    assert (stop.reason, stop.needs_history) == (StopReason.ASKED, False)


def test_newer_json_says_it_in_its_flags() -> None:
    """25.11 gives the base state beside COMPLETING: CANCELLED and NODE_FAIL need no accounting."""
    job = _job("cancelled")
    flags = frozenset({"CANCELLED", "COMPLETING"})
    stop = why_stopped(replace(job, flags=flags), now_epoch_s=0)
    assert (stop.reason, stop.needs_history) == (StopReason.CANCELLED, False)
    failed = replace(job, flags=frozenset({"NODE_FAIL", "COMPLETING"}))
    assert why_stopped(failed, now_epoch_s=0).reason is StopReason.NODE_FAILING
    waiting = replace(_job("gang"), flags=frozenset({"PENDING", "COMPLETING"}), end_epoch_s=1)
    assert why_stopped(waiting, now_epoch_s=0).pending_again


class Answers(SlurmClient):
    """Stands in for a client with given answers: a job or an error, then attempts or an error."""

    def __init__(self, job: Job | Exception, *histories: tuple[Job, ...] | Exception) -> None:
        super().__init__({})
        self._job, self._histories = job, list(histories)
        self.requeued: list[Job] = []

    def job(self, job_id: int) -> Job:
        if isinstance(self._job, Exception):
            raise self._job
        return self._job

    def history(self, job_id: JobId) -> tuple[Job, ...]:
        attempts = self._histories.pop(0) if len(self._histories) > 1 else self._histories[0]
        if isinstance(attempts, Exception):
            raise attempts
        return attempts

    def requeue(self, job: Job) -> None:
        self.requeued.append(job)


@pytest.mark.parametrize(
    ("name", "version", "requeued"),
    [
        ("grace", "22.05.8", True),
        ("grace", "24.11.5", False),
        ("asked", "24.11.5", True),
    ],
)
def test_a_job_in_its_grace_is_left_to_a_slurm_that_requeues_it(
    name: str, version: str, requeued: bool
) -> None:
    job = _job(name)
    settings = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    low = Partition(name=job.partition, preempt_mode="REQUEUE", grace_time_s=60, nodes=("n1",))
    policies = Policies(Config({**settings, "SLURM_VERSION": version}), (low, URGENT), None)
    client = Answers(job)
    allocation = Allocation(job_id=job.job_id, restart_count=job.restart_count)
    requeue(client, allocation, began_epoch_s=0.0, policies=policies)
    assert client.requeued == [job] * requeued


def test_controller_away() -> None:
    """Slurm that cannot be asked is a reason of its own, with Slurm's words in it."""
    stop = ask_why(Answers(ControllerUnreachable("nobody there")), 1)
    assert stop.reason is StopReason.UNKNOWN
    assert "nobody there" in stop.message


def test_accounting_that_is_late_is_asked_again() -> None:
    """Until it knows of the end of this attempt; the record of an earlier one does not count."""
    earlier = _attempt(JobState.CANCELLED, cancelled_by_uid=1)
    running = replace(_attempt(JobState.RUNNING), start_epoch_s=1795268000)
    preempted = replace(running, state=JobState.PREEMPTED)
    late = replace(running, state=JobState.PENDING)
    client = Answers(
        _job("cancelled"),
        NoSuchJob("not yet"),
        (earlier, running),
        (earlier, late),
        (earlier, preempted),
    )
    assert ask_why(client, 1).reason is StopReason.PREEMPTED


def test_no_accounting() -> None:
    """Without it the answer comes all the same, after the time that was allowed for it."""
    client = Answers(_job("cancelled"), NoSuchJob("Slurm accounting storage is disabled"))
    stop = ask_why(client, 1, history_within_s=0.0)
    assert (stop.reason, stop.needs_history) == (StopReason.CANCELLED, True)


def test_accounting_is_not_asked_about_a_requeue() -> None:
    """What follows is the same whoever it was, and it may be that of a thousand jobs at once."""
    client = Answers(_job("gang"), AssertionError("sacct was run"))
    stop = ask_why(client, 1)
    assert (stop.reason, stop.pending_again) == (StopReason.REQUEUED, True)
    assert stop.job == _job("gang")


@pytest.mark.parametrize("reason", list(StopReason))
def test_only_a_cancelled_job_is_left_ended(reason: StopReason) -> None:
    """A cancel is the one stop that is not undone."""
    assert reason.requeue is (reason is not StopReason.CANCELLED)
    assert reason.exit_code == (CANCELLED if reason is StopReason.CANCELLED else RUN_AGAIN)


def test_time_left() -> None:
    """From the signal to the job's EndTime, and KillWait after it; nothing kills a job that has no
    end."""
    assert Stop(StopReason.CANCELLED, "").time_left_s(29.6) == 29.6
    assert Stop(StopReason.UNKNOWN, "").time_left_s(29.6) == 29.6
    assert Stop(StopReason.PREEMPTED, "", to_end_s=12.5).time_left_s(29.6) == 12.5 + 29.6
    # asked late, after the grace: SIGKILL may have been on its way since
    assert Stop(StopReason.PREEMPTED, "", to_end_s=-10.0).time_left_s(29.6) == 29.6 - 10
    assert Stop(StopReason.PREEMPTED, "", to_end_s=-100.0).time_left_s(29.6) == 0
    assert Stop(StopReason.TIME_LIMIT, "", to_end_s=140).time_left_s(29.6) == 140 + 29.6
    assert Stop(StopReason.ASKED, "", to_end_s=1000).time_left_s(29.6) == 1000 + 29.6
    assert Stop(StopReason.ASKED, "", to_end_s=None).time_left_s(29.6) == math.inf
