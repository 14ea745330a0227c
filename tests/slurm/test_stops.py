"""Why we were stopped, read out of what a real Slurm said while the rank still lived."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hydroslurm.core.exitcodes import CANCELLED, RUN_AGAIN
from hydroslurm.core.jobid import JobId
from hydroslurm.errors import ControllerUnreachable, NoSuchJob
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.policy import Policies, StopReason
from hydroslurm.slurm.stops import Stop, ask_why, requeue, why_stopped
from hydroslurm.slurm.values import Job, JobState, Partition

URGENT = Partition(name="urgent", priority_tier=10, nodes=("n1",))
BEGAN = 1795267816
"""When each of these jobs began, as Slurm 22.05.8 shows it; test_stop_times.py asks a real one."""


def _shown(state: JobState, *, end_epoch_s: int | None, **more: Any) -> Job:
    more = {"start_epoch_s": BEGAN, "time_limit_s": 3600, "flags": frozenset({state.value}), **more}
    return Job(job_id=1, state=state, partition="low", end_epoch_s=end_epoch_s, **more)


JOBS = {
    "grace": _shown(JobState.RUNNING, end_epoch_s=BEGAN + 7, preempt_epoch_s=BEGAN + 1),
    # requeued by hand, without a grace, and by gang scheduling; the last at the end of a grace
    "requeued": _shown(JobState.COMPLETING, end_epoch_s=BEGAN + 3600, restart_count=1),
    "grace over": _shown(
        JobState.COMPLETING, start_epoch_s=None, end_epoch_s=None, restart_count=1
    ),
    "cancelled": _shown(JobState.COMPLETING, end_epoch_s=BEGAN),
    "time limit": _shown(
        JobState.COMPLETING, end_epoch_s=BEGAN + 87, time_limit_s=60, reason="TimeLimit"
    ),
    "limited": _shown(JobState.RUNNING, end_epoch_s=BEGAN + 3600),
}


def _attempt(state: JobState, **values: int) -> Job:
    return Job(job_id=1, state=state, start_epoch_s=BEGAN - 800, **values)


def _why(name: str, *, attempt: Job | None = None, after_s: float = 1.5) -> Stop:
    return why_stopped(JOBS[name], now_epoch_s=BEGAN + after_s, attempt=attempt)


PREEMPTED, TIME_LIMIT = StopReason.PREEMPTED, StopReason.TIME_LIMIT
CANCELLED_BY = _attempt(JobState.CANCELLED, cancelled_by_uid=1000)


@pytest.mark.parametrize(
    ("name", "after_s", "reason", "to_end_s", "ends_job"),
    [
        ("grace", 1.5, PREEMPTED, 5.5, True),
        ("time limit", 88, TIME_LIMIT, 0.0, True),
        ("limited", 3550, TIME_LIMIT, 50, False),
        ("limited", 50, StopReason.ASKED, 3550, False),
        ("cancelled", 0, StopReason.CANCELLED, 0.0, True),
        # clocks that differ do not make a cancelled job a requeued one
        ("cancelled", -240, StopReason.CANCELLED, 0.0, True),
    ],
)
def test_what_slurmctld_says(
    name: str, after_s: float, reason: StopReason, to_end_s: float, ends_job: bool
) -> None:
    """PreemptTime on a running job: preempted, and EndTime says how long the grace still is. A time
    limit is told by the reason or, of a running job, by its nearness. Nothing wrong with a running
    job: somebody sent the signal, and it goes on, as it does while a limit is only near. Only who
    cancelled is for accounting to say."""
    stop = _why(name, after_s=after_s)
    assert (stop.reason, stop.pending_again, stop.ends_job) == (reason, False, ends_job)
    assert stop.to_end_s == pytest.approx(to_end_s)
    assert stop.needs_history is (reason is StopReason.CANCELLED)


def test_an_earlier_warning() -> None:
    """Is recognized where its distance is known."""
    stop = why_stopped(JOBS["limited"], now_epoch_s=BEGAN + 3050, warning_s=600)
    assert stop.reason is TIME_LIMIT


@pytest.mark.parametrize("name", ["grace over", "requeued"])
@pytest.mark.parametrize(
    ("recorded", "reason"),
    [
        (None, StopReason.REQUEUED),
        (JobState.REQUEUED, StopReason.REQUEUED),
        (JobState.PREEMPTED, PREEMPTED),
        (JobState.NODE_FAIL, StopReason.NODE_FAILING),
    ],
)
def test_back_in_the_queue(name: str, recorded: JobState | None, reason: StopReason) -> None:
    """A requeue is seen from slurmctld alone, and that is enough; accounting would say whose."""
    stop = _why(name, attempt=_attempt(recorded) if recorded else None)
    assert (stop.reason, stop.pending_again, stop.needs_history) == (reason, True, False)
    if reason is StopReason.REQUEUED:
        assert ("by a preemption" in stop.message) is (recorded is None)


def test_cancelled() -> None:
    """A job that is ended and not requeued counts as cancelled; accounting knows by whom, and
    whether it was a preemption. A person's scancel counts more than one that came before it."""
    assert "user id" not in _why("cancelled").message
    known = _why("cancelled", attempt=CANCELLED_BY)
    assert (known.reason, known.message) == (StopReason.CANCELLED, "cancelled by user id 1000")
    preempted = _why("cancelled", attempt=_attempt(JobState.PREEMPTED))
    assert (preempted.reason, preempted.pending_again) == (PREEMPTED, False)
    in_its_grace = replace(JOBS["cancelled"], preempt_epoch_s=BEGAN - 2)
    assert why_stopped(in_its_grace, now_epoch_s=BEGAN).needs_history
    stop = why_stopped(in_its_grace, now_epoch_s=BEGAN, attempt=CANCELLED_BY)
    assert stop.reason is StopReason.CANCELLED


def test_newer_json_says_it_in_its_flags() -> None:
    """25.11 gives the base state beside COMPLETING: CANCELLED and NODE_FAIL need no accounting."""
    job = JOBS["cancelled"]
    flags = frozenset({"CANCELLED", "COMPLETING"})
    stop = why_stopped(replace(job, flags=flags), now_epoch_s=0)
    assert (stop.reason, stop.needs_history) == (StopReason.CANCELLED, False)
    failed = replace(job, flags=frozenset({"NODE_FAIL", "COMPLETING"}))
    assert why_stopped(failed, now_epoch_s=0).reason is StopReason.NODE_FAILING
    waiting = replace(JOBS["requeued"], flags=frozenset({"PENDING", "COMPLETING"}), end_epoch_s=1)
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
    [("grace", "22.05.8", True), ("grace", "24.11.5", False), ("limited", "24.11.5", True)],
)
def test_a_job_in_its_grace_is_left_to_a_slurm_that_requeues_it(
    name: str, version: str, requeued: bool
) -> None:
    job = JOBS[name]
    settings = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    low = Partition(name=job.partition, preempt_mode="REQUEUE", grace_time_s=60, nodes=("n1",))
    policies = Policies(Config({**settings, "SLURM_VERSION": version}), (low, URGENT), None)
    client = Answers(job)
    allocation = Allocation(job_id=job.job_id, restart_count=job.restart_count)
    requeue(client, allocation, began_epoch_s=0.0, policies=policies)
    assert client.requeued == [job] * requeued


def test_slurm_that_cannot_be_asked() -> None:
    """Is a reason of its own, with Slurm's words in it. Without accounting the answer comes all the
    same, after the time that was allowed for it."""
    stop = ask_why(Answers(ControllerUnreachable("nobody there")), 1)
    assert stop.reason is StopReason.UNKNOWN
    assert "nobody there" in stop.message
    client = Answers(JOBS["cancelled"], NoSuchJob("Slurm accounting storage is disabled"))
    stop = ask_why(client, 1, history_within_s=0.0)
    assert (stop.reason, stop.needs_history) == (StopReason.CANCELLED, True)


def test_accounting_that_is_late_is_asked_again() -> None:
    """Until it knows of the end of this attempt; the record of an earlier one does not count. About
    a requeue it is not asked: it may be that of a thousand jobs at once."""
    running = replace(_attempt(JobState.RUNNING), start_epoch_s=BEGAN)
    preempted = replace(running, state=JobState.PREEMPTED)
    late = replace(running, state=JobState.PENDING)
    client = Answers(
        JOBS["cancelled"],
        NoSuchJob("not yet"),
        (CANCELLED_BY, running),
        (CANCELLED_BY, late),
        (CANCELLED_BY, preempted),
    )
    assert ask_why(client, 1).reason is PREEMPTED
    stop = ask_why(Answers(JOBS["requeued"], AssertionError("sacct was run")), 1)
    assert (stop.reason, stop.pending_again) == (StopReason.REQUEUED, True)
    assert stop.job == JOBS["requeued"]


def test_only_a_cancelled_job_is_left_ended() -> None:
    """A cancel is the one stop that is not undone."""
    assert [reason for reason in StopReason if not reason.requeue] == [StopReason.CANCELLED]
    assert [reason for reason in StopReason if reason.exit_code != RUN_AGAIN] == ["cancelled"]
    assert StopReason.CANCELLED.exit_code == CANCELLED


def test_time_left() -> None:
    """From the signal to the job's EndTime, and KillWait after it; nothing kills a job that has no
    end."""
    told: list[tuple[float | None, float]] = [
        (0.0, 29.6),
        (12.5, 12.5 + 29.6),
        (-10.0, 29.6 - 10),  # asked late, after the grace: SIGKILL may have been on its way since
        (-100.0, 0),
        (None, math.inf),
    ]
    for to_end_s, left_s in told:
        assert Stop(PREEMPTED, "", to_end_s=to_end_s).time_left_s(29.6) == left_s
