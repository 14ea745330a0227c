"""Watch all jobs with one request to Slurm per interval, however many jobs there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

from hydroslurm.core.garbage import without_gc
from hydroslurm.core.jobid import JobId
from hydroslurm.errors import SlurmError, SlurmMissing
from hydroslurm.observe.folder import FollowedRun, facts_of
from hydroslurm.observe.row import Row
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.policy import Policies, read_policies
from hydroslurm.slurm.run_folders import run_dirs_of
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

    jobs: tuple[Row, ...]
    epoch_s: float
    answered_epoch_s: float | None
    error: str | None = None
    missing: tuple[JobId, ...] = ()

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Rows by urgency."""
        return tuple(sorted(self.jobs, key=Row.attention))


@dataclass
class _Seen:
    job: Job
    runs: tuple[FollowedRun, ...]
    settled: bool = False
    forgotten_epoch_s: float | None = None


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
        self._seen: dict[JobId, _Seen] = {}
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
                self._policies = read_policies(self._client)
            jobs = self._client.jobs(user=self._user, ids=self._ids or None)
        except SlurmMissing:
            raise
        except SlurmError as reason:
            error = " ".join(str(reason).split())
        now_epoch_s = self._clock()
        if error is None:
            self._answered_epoch_s = now_epoch_s
            self._note(jobs, now_epoch_s)
        for seen in self._seen.values():
            for run in seen.runs if not seen.settled else ():
                run.read()
        return self._view(now_epoch_s, error)

    def _note(self, jobs: tuple[Job, ...], now_epoch_s: float) -> None:
        if self._partition is not None:
            jobs = tuple(job for job in jobs if self._partition in job.partition.split(","))
        for job in jobs:
            seen = self._seen.get(job.id)
            runs = run_dirs_of(job)
            if seen is None or tuple(followed.run for followed in seen.runs) != runs:
                self._seen[job.id] = _Seen(job, tuple(map(FollowedRun, runs)))
                continue
            # the last lines of a job that just ended remain to be read
            seen.settled = seen.job.state is job.state and _is_still(job)
            seen.job, seen.forgotten_epoch_s = job, None
        listed = {job.id for job in jobs}
        for job_id in self._seen.keys() - listed:
            self._forget(job_id, now_epoch_s)

    def _forget(self, job_id: JobId, now_epoch_s: float) -> None:
        """Drop a job that Slurm no longer lists: it has ended. Drop it at once if we saw it end;
        otherwise show it for a while, so that nobody has to ask Slurm what became of it."""
        seen = self._seen[job_id]
        if seen.forgotten_epoch_s is None:
            seen.forgotten_epoch_s = now_epoch_s
        array = bool(seen.job.id.tasks)
        gone_s = now_epoch_s - seen.forgotten_epoch_s
        if seen.job.state.has_ended or array or gone_s > FORGOTTEN_FOR_S:
            del self._seen[job_id]

    def _view(self, now_epoch_s: float, error: str | None) -> View:
        jobs = tuple(
            Row(
                job=seen.job,
                facts=facts_of(seen.runs, seen.job.restart_count),
                policy=self._policies.of(seen.job) if self._policies else None,
                now_epoch_s=now_epoch_s,
                forgotten=seen.forgotten_epoch_s is not None,
            )
            for seen in self._seen.values()
        )
        known = [seen.job for seen in self._seen.values()]
        unknown = (i for i in self._ids if not any(job.is_named(i) for job in known))
        missing = tuple(unknown) if error is None else ()
        return View(jobs, now_epoch_s, self._answered_epoch_s, error, missing)


def _is_still(job: Job) -> bool:
    """Whether none of its processes write."""
    return job.state.has_ended or job.state.is_waiting
