"""What is known of a run besides its event log: Slurm's accounting, and nsys profiles.

Slurm's timestamps are whole seconds of the controller's date. An attempt in Slurm's accounting and
one in the event log are the same when the former contains the latter's first event: job ids alone
are not enough, because another cluster counts the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from hydroslurm.core.files import clean
from hydroslurm.core.jobid import JobId
from hydroslurm.errors import NoSuchJob, SlurmError, SlurmMissing
from hydroslurm.report.attempts import Attempt, StopRequest
from hydroslurm.report.history import History
from hydroslurm.report.nsys.profile import Profile, ProfiledPause, ProfiledStop
from hydroslurm.report.pauses import Pause
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.values import Job, JobState

_SLACK_S = 2.0
"""Slurm's moments are cut off to whole seconds, and its date may be another one's."""
_MOST = 200
"""Characters of what Slurm's programs say for themselves."""


@dataclass(frozen=True)
class SlurmAttempt:
    """One attempt of a job in Slurm's accounting; seconds since 1970, None where unknown.

    Attributes:
        job_id: its own number, as its processes know it.
        number: earlier attempts, as far as accounting has them.
        state: how it ended (``REQUEUED``, ``PREEMPTED`` ...), or its current state.
        submit_epoch_s: when it was submitted, or requeued.
        eligible_epoch_s: when it became eligible to start.
        start_epoch_s: when its nodes were allocated.
        end_epoch_s: when they were released; None while it runs.
        suspended_s: how long it was suspended in total.
        name: what Slurm calls the job: ``44_3`` for an element of an array.
    """

    job_id: int
    number: int
    state: str
    submit_epoch_s: int | None = None
    eligible_epoch_s: int | None = None
    start_epoch_s: int | None = None
    end_epoch_s: int | None = None
    suspended_s: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Accounting:
    """The answers of one Slurm.

    Attributes:
        attempts: those of all jobs, by job, oldest first.
        suspend_grace_s: between SIGTSTP and SIGSTOP on this site, today.
        missing: what Slurm could not answer, in sentences.
    """

    attempts: tuple[SlurmAttempt, ...] = ()
    suspend_grace_s: int | None = None
    missing: tuple[str, ...] = ()

    def of(self, attempt: Attempt) -> SlurmAttempt | None:
        """The attempt of Slurm's in which an attempt of the log began."""
        began_ns = attempt.epoch_ns(attempt.first_mono_ns)
        mine = [one for one in self.attempts if one.job_id == attempt.job_id]
        # the date of that host was set; the controller's may have been the same one
        for moment_ns in (began_ns + attempt.date_ahead_ns, began_ns):
            found = [one for one in mine if _holds(one, moment_ns / 1e9)]
            if found:
                return found[-1]
        return None

    def names(self, job_ids: Iterable[int]) -> str:
        """What Slurm calls these jobs; where it was not asked, their own numbers."""
        known = {one.job_id: one.name for one in self.attempts if one.name}
        return ", ".join(known.get(job_id, str(job_id)) for job_id in job_ids)

    def after(self, attempt: SlurmAttempt) -> SlurmAttempt | None:
        """The next one of the same job."""
        same_job = [one for one in self.attempts if one.job_id == attempt.job_id]
        following = same_job[same_job.index(attempt) + 1 :]
        return following[0] if following else None


def ask_slurm(client: SlurmClient, attempts: Iterable[Attempt]) -> Accounting:
    """Ask for the jobs of these attempts; what cannot be learned is named in ``missing``."""
    attempts = tuple(attempts)
    job_ids = sorted({attempt.job_id for attempt in attempts if attempt.job_id is not None})
    found: list[SlurmAttempt] = []
    missing: list[str] = []
    grace_s: int | None = None
    try:
        for job_id in job_ids:
            found += _attempts(client, job_id, missing)
        if job_ids:
            grace_s = client.config().suspend_grace_time_s
    except SlurmError as error:
        missing.append(no_answer(error))
    answer = Accounting(tuple(found), grace_s, ())
    for job_id in job_ids:
        mine = [attempt for attempt in attempts if attempt.job_id == job_id]
        known = any(one.job_id == job_id for one in found)
        if known and not any(answer.of(attempt) for attempt in mine):
            missing.append(
                f"Slurm knows a job {job_id}, but of another time: it is another cluster's, and "
                "its answers are not used"
            )
            found = [one for one in found if one.job_id != job_id]
    return Accounting(tuple(found), grace_s, tuple(missing))


def no_answer(error: SlurmError) -> str:
    """Why Slurm did not answer, in one line. If Slurm is not installed, only that: reports are
    often read on machines without it, where neither the PATH nor a remedy helps."""
    why = " ".join(str(error).split())
    if isinstance(error, SlurmMissing):
        why = why.partition(" (")[0].partition(". ")[0]
    return f"Slurm could not be asked: {why if len(why) <= _MOST else why[:_MOST] + ' ...'}"


@dataclass(frozen=True)
class ExternalSources:
    """Other sources, each joined to the log by what both of them hold.

    Attributes:
        accounting: Slurm's answers.
        profiles: nsys reports. A pause or stop of one is that of the log with the same process and
            the same stamp of its request, to the nanosecond.
        missing: what could not be read, in sentences.
    """

    accounting: Accounting = field(default_factory=Accounting)
    profiles: tuple[Profile, ...] = ()
    missing: tuple[str, ...] = ()

    def profiled_pause(self, attempt: Attempt, pause: Pause) -> ProfiledPause | None:
        request_ns = pause.requested_mono_ns
        return None if request_ns is None else self._pauses.get((attempt.pid, request_ns))

    def profiled_stop(self, attempt: Attempt, request: StopRequest | None) -> ProfiledStop | None:
        return self._stops.get((attempt.pid, request.requested_mono_ns)) if request else None

    @cached_property
    def _pauses(self) -> dict[tuple[int, int | None], ProfiledPause]:
        return {
            (p.pid, p.requested_mono_ns): p for profile in self.profiles for p in profile.pauses
        }

    @cached_property
    def _stops(self) -> dict[tuple[int, int | None], ProfiledStop]:
        return {(s.pid, s.requested_mono_ns): s for profile in self.profiles for s in profile.stops}

    def sentences(self, history: History) -> list[str]:
        """What is missing, and of which profile nothing belongs to this run."""
        pids = {attempt.pid for attempt in history.attempts}
        said = [*history.missing, *self.accounting.missing, *self.missing]
        for profile in self.profiles:
            said += [f"{profile.path.name}: {sentence}" for sentence in profile.missing]
            if history.attempts and not pids & set(profile.pids):
                said.append(f"{profile.path.name}: it holds no process of this run.")
        return [_sentence(one) for one in said]


def _sentence(text: str) -> str:
    text = clean(text, most=2000)
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _attempts(client: SlurmClient, job_id: int, missing: list[str]) -> list[SlurmAttempt]:
    """From accounting; of a cluster without it, the attempt that slurmctld still knows."""
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
