"""What Slurm knows of a run's jobs: when each life was eligible, began, ended, was suspended.

Slurm's moments are whole seconds of the controller's date. A life of Slurm's and one of the event
log belong together when the one holds the first event of the other: ids alone do not tell, for
another cluster counts the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from hydroslurm.errors import NoSuchJob, SlurmError, SlurmMissing
from hydroslurm.report.pauses import Life
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.values import Job, JobState

_SLACK_S = 2.0
"""Slurm's moments are cut off to whole seconds, and its date may be another one's."""
_MOST = 200
"""Characters of what Slurm's programs say for themselves."""


@dataclass(frozen=True)
class SlurmLife:
    """One life of a job in Slurm's accounts; moments in seconds since 1970, None where not told.

    Attributes:
        job_id: Slurm's.
        number: lives before, as far as accounting holds them.
        state: how it ended, ``REQUEUED``, ``PREEMPTED`` ...; or what it does now.
        submit_epoch_s: when it was submitted, or requeued.
        eligible_epoch_s: from when on it might start.
        start_epoch_s: when it was given its nodes.
        end_epoch_s: when it gave them back; None while it goes on.
        suspended_s: how long it was suspended in all.
    """

    job_id: int
    number: int
    state: str
    submit_epoch_s: int | None = None
    eligible_epoch_s: int | None = None
    start_epoch_s: int | None = None
    end_epoch_s: int | None = None
    suspended_s: int | None = None


@dataclass(frozen=True)
class Accounting:
    """The answers of one Slurm.

    Attributes:
        lives: those of all jobs, by job, oldest first.
        suspend_grace_s: between SIGTSTP and SIGSTOP on this site, today.
        missing: what could not be learned, in sentences.
    """

    lives: tuple[SlurmLife, ...] = ()
    suspend_grace_s: int | None = None
    missing: tuple[str, ...] = ()
    _next: dict[SlurmLife, SlurmLife] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for before, after in itertools.pairwise(self.lives):
            if before.job_id == after.job_id:
                self._next[before] = after

    def of(self, life: Life) -> SlurmLife | None:
        """The life of Slurm's in which a life of the log began."""
        began_ns = life.epoch_ns(life.first_mono_ns)
        mine = [one for one in self.lives if one.job_id == life.job_id]
        # the date of that host was set; the controller's may have been the same one
        for moment_ns in (began_ns + life.date_ahead_ns, began_ns):
            found = [one for one in mine if _holds(one, moment_ns / 1e9)]
            if found:
                return found[-1]
        return None

    def after(self, life: SlurmLife) -> SlurmLife | None:
        """The next one of the same job."""
        return self._next.get(life)


def ask_slurm(client: SlurmClient, lives: Iterable[Life]) -> Accounting:
    """Ask for the jobs of these lives; what cannot be learned is named in ``missing``."""
    lives = tuple(lives)
    job_ids = sorted({life.job_id for life in lives if life.job_id is not None})
    found: list[SlurmLife] = []
    missing: list[str] = []
    grace_s: int | None = None
    try:
        for job_id in job_ids:
            found += _lives(client, job_id, missing)
        if job_ids:
            grace_s = client.config().suspend_grace_time_s
    except SlurmError as error:
        missing.append(no_answer(error))
    answer = Accounting(tuple(found), grace_s, ())
    for job_id in job_ids:
        mine = [life for life in lives if life.job_id == job_id]
        known = any(one.job_id == job_id for one in found)
        if known and not any(answer.of(life) for life in mine):
            missing.append(
                f"Slurm knows a job {job_id}, but of another time: it is another cluster's, and "
                "its answers are not used"
            )
            found = [one for one in found if one.job_id != job_id]
    return Accounting(tuple(found), grace_s, tuple(missing))


def no_answer(error: SlurmError) -> str:
    """Why Slurm told nothing, in a line. Of a Slurm that is missing only that: a report is often
    read where there is none, and neither the PATH nor what to do about it helps there."""
    words = " ".join(str(error).split())
    if isinstance(error, SlurmMissing):
        words = words.partition(" (")[0].partition(". ")[0]
    return f"Slurm could not be asked: {words if len(words) <= _MOST else words[:_MOST] + ' ...'}"


def not_asked(why: str) -> Accounting:
    """Where Slurm is not there, or is not to be asked."""
    return Accounting(missing=(why,))


def _lives(client: SlurmClient, job_id: int, missing: list[str]) -> list[SlurmLife]:
    """From accounting; of a cluster without it, the life that slurmctld still knows."""
    try:
        return [_life(job) for job in client.history(job_id)]
    except NoSuchJob as error:
        missing.append(f"Accounting: {error}")
    try:
        return [_life(client.job(job_id))]
    except NoSuchJob:
        return []


def _life(job: Job) -> SlurmLife:
    # of a running job squeue tells the end of its time limit
    goes_on = not job.state.has_ended and job.state is not JobState.REQUEUED
    return SlurmLife(
        job_id=job.job_id,
        number=job.restart_count,
        state=job.state.value,
        submit_epoch_s=job.submit_epoch_s,
        eligible_epoch_s=job.eligible_epoch_s,
        start_epoch_s=job.start_epoch_s,
        end_epoch_s=None if goes_on else job.end_epoch_s,
        suspended_s=job.suspended_s,
    )


def _holds(life: SlurmLife, moment_s: float) -> bool:
    if life.start_epoch_s is None or moment_s < life.start_epoch_s - _SLACK_S:
        return False
    return life.end_epoch_s is None or moment_s <= life.end_epoch_s + _SLACK_S
