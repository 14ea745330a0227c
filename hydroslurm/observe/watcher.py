"""Watch all jobs with one request to Slurm per interval, however many jobs there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

from hydroslurm.core.garbage import without_gc
from hydroslurm.core.jobid import JobId
from hydroslurm.errors import SlurmError, SlurmMissing
from hydroslurm.observe.job import JobView
from hydroslurm.observe.training import Training, newest_of, ranks_dirs_of
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.policy import Policies
from hydroslurm.slurm.values import Job

FORGOTTEN_FOR_S = 300.0
"""How long a job stays visible if Slurm has forgotten it while we looked elsewhere."""


@dataclass(frozen=True)
class View:
    """All jobs at one moment.

    Attributes:
        jobs: in Slurm's order.
        epoch_s: when it was made.
        answered_epoch_s: Slurm's last answer; None before the first.
        error: why Slurm did not answer this time, in words.
        missing: requested ids that Slurm does not know.
    """

    jobs: tuple[JobView, ...]
    epoch_s: float
    answered_epoch_s: float | None
    error: str | None = None
    missing: tuple[JobId, ...] = ()

    @cached_property
    def rows(self) -> tuple[JobView, ...]:
        """The same by urgency."""
        return tuple(sorted(self.jobs, key=JobView.attention))


class Watcher:
    """Looks at jobs; only one thread at a time may use it.

    Args:
        user: only this user's; None: all users'.
        partition: only this one's.
        ids: only these jobs, and the tasks of these arrays.
        policies: ask once, at the first look, how the site preempts; if False, the possible loss
            is unknown.
    """

    def __init__(
        self,
        client: SlurmClient,
        *,
        user: str | None,
        partition: str | None = None,
        ids: Collection[JobId] = (),
        policies: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._user = user
        self._partition = partition
        self._ids = tuple(ids)
        self._wants_policies = policies
        self._policies: Policies | None = None
        self._clock = clock
        self._views: dict[JobId, JobView] = {}
        self._answered_epoch_s: float | None = None

    @without_gc()
    def look(self) -> View:
        """Ask Slurm, and read what is new in the run folders. The view says if Slurm is absent.

        Raises:
            SlurmMissing: there is no Slurm here.
        """
        error = None
        try:
            if self._wants_policies:
                self._wants_policies = False
                self._policies = Policies.read(self._client)
            jobs = self._client.jobs(user=self._user, ids=self._ids or None)
        except SlurmMissing:
            raise
        except SlurmError as reason:
            error = " ".join(str(reason).split())
        now_epoch_s = self._clock()
        if error is None:
            self._answered_epoch_s = now_epoch_s
            self._views = self._listed(jobs, now_epoch_s)
        else:
            self._views = {
                job_id: self._next(
                    view, view.job, now_epoch_s, forgotten_epoch_s=view.forgotten_epoch_s
                )
                for job_id, view in self._views.items()
            }
        views = tuple(self._views.values())
        unknown = (i for i in self._ids if not any(view.job.is_named(i) for view in views))
        missing = tuple(unknown) if error is None else ()
        return View(views, now_epoch_s, self._answered_epoch_s, error, missing)

    def _listed(self, jobs: tuple[Job, ...], now_epoch_s: float) -> dict[JobId, JobView]:
        """The jobs of an answer, and those that Slurm lists no more: they have ended. One that we
        saw end is dropped at once; another is shown for a while, so that nobody has to ask Slurm
        what became of it."""
        views = {
            job.id: self._next(self._views.get(job.id), job, now_epoch_s)
            for job in jobs
            if self._partition is None or self._partition in job.partition.split(",")
        }
        for job_id in self._views.keys() - views.keys():
            view = self._views[job_id]
            since_s = view.forgotten_epoch_s or now_epoch_s
            is_old = now_epoch_s - since_s > FORGOTTEN_FOR_S
            if not (view.job.state.has_ended or view.job.id.tasks or is_old):
                views[job_id] = self._next(view, view.job, now_epoch_s, forgotten_epoch_s=since_s)
        return views

    def _next(
        self,
        before: JobView | None,
        job: Job,
        now_epoch_s: float,
        *,
        forgotten_epoch_s: float | None = None,
    ) -> JobView:
        """The view of a job after an earlier one: what has changed in its folders is read."""
        # the last lines of a job that just ended remain to be read
        if before is not None and before.job.state is job.state and _is_still(job):
            run, trainings = before.run, before.trainings
        else:
            known = {one.run: one for one in (before.trainings if before else ())}
            folders = ranks_dirs_of(job)
            run = newest_of(folders)
            trainings = tuple(known.get(one, Training(one)).read() for one in folders)
        return JobView(
            run,
            job,
            followed=trainings,
            policy=self._policies.of(job) if self._policies else None,
            now_epoch_s=now_epoch_s,
            forgotten_epoch_s=forgotten_epoch_s,
        )


def _is_still(job: Job) -> bool:
    """Whether none of its processes write."""
    return job.state.has_ended or job.state.is_waiting
