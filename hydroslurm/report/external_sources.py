"""Sources besides the event log (Slurm's accounting and nsys profiles), joined to the log's pauses
and stops: a pause or stop of a profile is the log's with the same process and the same request
stamp, to the nanosecond.

Slurm's timestamps are whole seconds of the controller's date. An attempt in Slurm's accounting is
the one in the event log whose first event it contains: job ids alone are not enough, as another
cluster may use the same ones.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from hydroslurm.core.figure import figure
from hydroslurm.core.jobid import JobId
from hydroslurm.errors import NoSuchJob, SlurmError, SlurmMissing
from hydroslurm.report.attempts import Attempt
from hydroslurm.report.history import History
from hydroslurm.report.lines import span
from hydroslurm.report.nsys import Profile, ProfiledPause, ProfiledStop
from hydroslurm.report.pauses import PEERS, Pause, Profiled
from hydroslurm.report.stops import SlurmAttempt, Stop, Stopped
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.values import Job, JobState

_SLACK_S = 2.0
"""Tolerance: Slurm cuts moments off to whole seconds, and uses another host's date."""
_MOST = 200
"""Characters kept of an error from Slurm's programs."""


@dataclass(frozen=True)
class Accounting:
    """Answers of Slurm's accounting."""

    # fmt: off
    attempts: tuple[SlurmAttempt, ...] = figure(
        "Those of the run's jobs, by job, oldest first; empty where Slurm was not asked.",
        default=())
    suspend_grace_s: int | None = figure("Between SIGTSTP and SIGSTOP on this site, today.")
    missing: tuple[str, ...] = figure("What Slurm could not answer, in sentences.", default=())
    # fmt: on

    def of(self, attempt: Attempt) -> SlurmAttempt | None:
        """Return Slurm's attempt in which an attempt of the log began."""
        began_s = attempt.epoch_ns(attempt.first_mono_ns) / 1e9
        attempts = [a for a in self.attempts if a.job_id == attempt.job_id and _holds(a, began_s)]
        return attempts[-1] if attempts else None

    def names(self, job_ids: Iterable[int]) -> str:
        """Return Slurm's names of these jobs, or their numbers if it was not asked."""
        known = {a.job_id: a.name for a in self.attempts if a.name}
        return ", ".join(known.get(job_id, str(job_id)) for job_id in job_ids)

    def after(self, attempt: SlurmAttempt) -> SlurmAttempt | None:
        """Return the next attempt of the same job."""
        same_job = [a for a in self.attempts if a.job_id == attempt.job_id]
        following = same_job[same_job.index(attempt) + 1 :]
        return following[0] if following else None


def ask_slurm(connect: Callable[[], SlurmClient], attempts: Iterable[Attempt]) -> Accounting:
    """Ask Slurm about these attempts' jobs; ``missing`` names what it could not tell."""
    attempts = tuple(attempts)
    job_ids = sorted({attempt.job_id for attempt in attempts if attempt.job_id is not None})
    answers: list[SlurmAttempt] = []
    missing: list[str] = []
    grace_s: int | None = None
    if not job_ids:
        return Accounting()
    try:
        client = connect()
        for job_id in job_ids:
            answers += _attempts(client, job_id, missing)
        grace_s = client.config().suspend_grace_time_s
    except SlurmError as error:
        missing.append(_no_answer(error))
    answer = Accounting(tuple(answers), grace_s)
    for job_id in job_ids:
        of_job = [attempt for attempt in attempts if attempt.job_id == job_id]
        known = any(a.job_id == job_id for a in answers)
        if known and not any(answer.of(attempt) for attempt in of_job):
            missing.append(
                f"Slurm knows a job {job_id}, but of another time: it is another cluster's, or a "
                "date was set; its answers are not used"
            )
            answers = [a for a in answers if a.job_id != job_id]
    return Accounting(tuple(answers), grace_s, tuple(missing))


def _no_answer(error: SlurmError) -> str:
    """Explain in one line why Slurm did not answer. If it is not installed, say only that:
    reports are often read on machines without it, where neither PATH nor a remedy helps."""
    why = " ".join(str(error).split())
    if isinstance(error, SlurmMissing):
        why = why.partition(" (")[0].partition(". ")[0]
    return f"Slurm could not be asked: {why if len(why) <= _MOST else why[:_MOST] + ' ...'}"


def _attempts(client: SlurmClient, job_id: int, missing: list[str]) -> list[SlurmAttempt]:
    """Return a job's attempts from accounting; without it, the one slurmctld still knows."""
    try:
        records = client.history(JobId(job_id))  # of all elements, if it is an array's, too
        return [_attempt(job) for job in records if job.job_id == job_id]
    except NoSuchJob as error:
        missing.append(f"Accounting: {error}")
    try:
        return [_attempt(client.job(job_id))]
    except NoSuchJob:
        return []


def _attempt(job: Job) -> SlurmAttempt:
    # for a running job squeue shows the end of its time limit
    is_running = not job.state.has_ended and job.state is not JobState.REQUEUED
    return SlurmAttempt(
        job_id=job.job_id,
        number=job.restart_count,
        state=job.state.value,
        submit_epoch_s=job.submit_epoch_s,
        eligible_epoch_s=job.eligible_epoch_s,
        start_epoch_s=job.start_epoch_s,
        end_epoch_s=None if is_running else job.end_epoch_s,
        suspended_s=job.suspended_s,
        name=str(job.id),
    )


def _holds(attempt: SlurmAttempt, moment_s: float) -> bool:
    if attempt.start_epoch_s is None or moment_s < attempt.start_epoch_s - _SLACK_S:
        return False
    return attempt.end_epoch_s is None or moment_s <= attempt.end_epoch_s + _SLACK_S


# --- joined to the log ----------------------------------------------------------------------------


class PauseRow(NamedTuple):
    """A pause with its attempt, and what other sources add."""

    attempt: Attempt
    pause: Pause
    at_s: float | None
    asked_us: float | None
    stopped_us: float | None
    nsys: Profiled | None

    @property
    def joined(self) -> Pause:
        """Return the pause with all of it."""
        return replace(
            self.pause,
            at_s=self.at_s,
            asked_us=self.asked_us,
            stopped_us=self.stopped_us,
            nsys=self.nsys,
        )


def pause_rows(
    history: History, accounting: Accounting, profiles: Iterable[Profile]
) -> list[PauseRow]:
    """Return all pauses of a run, by rank, then time."""
    asked = _Asked(history)
    profiled = {(p.pid, p.requested_mono_ns): p for profile in profiles for p in profile.pauses}
    return [
        PauseRow(
            attempt,
            pause,
            None
            if pause.begin_mono_ns is None
            else history.since_begin_s(attempt, pause.begin_mono_ns),
            asked.before_us(attempt, pause),
            _stopped_us(pause, accounting.suspend_grace_s),
            _profiled(pause, profiled.get((attempt.pid, pause.requested_mono_ns))),
        )
        for attempt in history.attempts
        for pause in attempt.pauses
    ]


def stopped_rows(
    history: History, accounting: Accounting, profiles: Iterable[Profile]
) -> list[Stopped]:
    """Return all stops of a run, with all that other sources know of them; by rank, then time."""
    profiled = {(s.pid, s.requested_mono_ns): s for profile in profiles for s in profile.stops}
    rows = []
    for stopped in history.stopped:
        asked = stopped.attempt.stops[:1]
        seen = profiled.get((stopped.attempt.pid, asked[0].requested_mono_ns)) if asked else None
        rows.append(replace(stopped, stop=_joined(history, accounting, seen, stopped)))
    return rows


def _joined(
    history: History, accounting: Accounting, seen: ProfiledStop | None, stopped: Stopped
) -> Stop:
    attempt, following, stop = stopped.attempt, stopped.following, stopped.stop
    before = accounting.of(attempt)
    after = accounting.of(following) if following else None
    if after is None and before is not None:
        after = accounting.after(before)  # still waiting, or without an event yet
    end_s = before.end_epoch_s if before else None
    eligible_s = after.eligible_epoch_s if after else None
    started_s = after.start_epoch_s if after else None
    first_s = following.epoch_ns(following.first_mono_ns) / 1e9 if following else None
    per_step, lost = attempt.progress.samples_per_step, stop.steps_lost

    def nsys_ms(name: str) -> float | None:
        return span(seen.requested_mono_ns, getattr(seen, f"{name}_mono_ns"), 1e6) if seen else None

    return replace(
        stop,
        at_s=history.since_begin_s(attempt, stopped.begin_mono_ns),
        left_s=span(stop.requested_mono_ns, attempt.last_mono_ns, 1e9),
        slurm_before=before,
        slurm_after=after if after != before else None,
        eligible_s=_later_s(end_s, eligible_s),
        queued_s=_later_s(eligible_s, started_s),
        start_s=_later_s(started_s, first_s),
        samples_lost=None if lost is None or per_step is None else lost * per_step,
        nsys_saving_ms=nsys_ms("saving"),
        nsys_durable_ms=nsys_ms("durable"),
        nsys_committed_ms=nsys_ms("committed"),
        nsys_requeued_ms=nsys_ms("requeued"),
    )


def _stopped_us(pause: Pause, grace_s: int | None) -> float | None:
    """Return when the process stopped. It cannot see that; slurmstepd counts from SIGTSTP."""
    if grace_s is None or "slurm" not in pause.causes or pause.signal != "SIGTSTP":
        return None
    held_us = span(pause.requested_mono_ns, pause.resume_requested_mono_ns, 1e3)
    if held_us is not None and held_us < grace_s * 1e6:
        return None
    return grace_s * 1e6


def _profiled(pause: Pause, seen: ProfiledPause | None) -> Profiled | None:
    if seen is None or pause.requested_mono_ns is None:
        return None
    begin_ns, resume_ns = pause.requested_mono_ns, pause.resume_requested_mono_ns
    park_us = span(begin_ns, seen.parked_mono_ns, 1e3)
    resume_us = span(resume_ns, seen.running_mono_ns, 1e3)
    both = ((park_us, pause.park_us), (resume_us, pause.resume_us))
    apart = [abs(ours - theirs) for ours, theirs in both if ours is not None and theirs is not None]
    return Profiled(
        park_us=park_us,
        drain_us=span(seen.parked_mono_ns, seen.drained_mono_ns, 1e3),
        resume_us=resume_us,
        last_kernel_us=span(begin_ns, seen.last_kernel_end_mono_ns, 1e3),
        first_kernel_us=span(resume_ns, seen.first_kernel_mono_ns, 1e3),
        difference_us=max(apart, default=None),
        error_us=None if seen.error_ns is None else seen.error_ns / 1e3,
    )


class _Asked:
    """Finds the request of the signalled rank for a rank that was held with it."""

    def __init__(self, history: History) -> None:
        self._requests: dict[tuple[int | None, int], list[tuple[int, int]]] = {}
        for attempt in history.attempts:
            requests = self._requests.setdefault((attempt.job_id, attempt.restart_count), [])
            for pause in attempt.pauses:
                begin_ns = pause.requested_mono_ns
                if pause.main_cause not in (None, PEERS) and begin_ns is not None:
                    end_ns = pause.resumed_mono_ns or attempt.last_mono_ns
                    requests.append((attempt.epoch_ns(begin_ns), attempt.epoch_ns(end_ns)))
        for requests in self._requests.values():
            requests.sort()

    def before_us(self, attempt: Attempt, pause: Pause) -> float | None:
        if pause.main_cause != PEERS or pause.requested_mono_ns is None:
            return None
        learned_ns = attempt.epoch_ns(pause.requested_mono_ns)
        requests = self._requests.get((attempt.job_id, attempt.restart_count), [])
        at = bisect.bisect_right(requests, (learned_ns, 1 << 63))
        # several may be in force: the first one counts
        covering = [begin for begin, end in requests[max(0, at - 8) : at] if learned_ns <= end]
        return (learned_ns - covering[0]) / 1e3 if covering else None


def _later_s(begin_s: float | None, end_s: float | None) -> float | None:
    """Return the difference; 0 if rounding made it negative, None if a date was set back."""
    if begin_s is None or end_s is None or end_s < begin_s - 2:
        return None
    return max(0.0, float(end_s - begin_s))
