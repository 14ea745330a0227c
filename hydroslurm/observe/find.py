"""Which job, and which run folder, a user means; and all jobs of a user."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path

from hydroslurm.core import rundir
from hydroslurm.core.jobid import JobId
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import (
    ControllerUnreachable,
    NoSuchJob,
    RunFolderError,
    SlurmError,
    SlurmMissing,
    UsageError,
)
from hydroslurm.observe.job import JobView
from hydroslurm.observe.training import member_of, ranks_dir_of, run_dir_of
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.run_folders import read_owner, run_dirs_of
from hydroslurm.slurm.values import Job

_SUBMITTED = re.compile(r"sbatch (/.+)/job\.sbatch", re.DOTALL)
"""How we call sbatch: with a file in the run folder and nothing else."""
_MOST_LISTED = 20


def locate(client: SlurmClient, which: str) -> tuple[RunDir, Job | None]:
    """The run folder and the job of a job id (``12``, ``12_3``) or a run folder; of the latter also
    where there is no Slurm.

    Raises:
        NoSuchJob, SlurmMissing, ControllerUnreachable: Slurm knows no such job, or cannot be asked.
        UsageError: it means all elements of an array.
    """
    try:
        job_id = JobId.parse(which)
    except UsageError:
        run = RunDir(Path(which).absolute())
        if not run.root.is_dir():
            raise NoSuchJob(
                f"{which!r} is neither the id of a job nor a run folder; an id is 44, or 44_3 for "
                "an element of an array"
            ) from None
        slurm = _job_of_folder(client, run)
        # another cluster may have a job of that number
        folders = () if slurm is None else run_dirs_of(slurm)
        is_its = any(one.root.resolve() == run.root.resolve() for one in folders)
        return run, slurm if is_its else None
    try:
        slurm = find_job(client, job_id)
    except (NoSuchJob, SlurmMissing, ControllerUnreachable) as error:
        message = f"{error}. Where the run folder of the job is known, give that in place of its id"
        raise type(error)(message) from None
    return ranks_dir_of(slurm), slurm


def view_of(client: SlurmClient, which: str) -> JobView:
    """The job of an id or a run folder.

    Raises:
        NoSuchJob, SlurmMissing, ControllerUnreachable: as :func:`locate`.
        RunFolderError: it is no job of hydroslurm's, or its run folder cannot be read.
    """
    run, slurm = locate(client, which)
    view = JobView(run, slurm)
    try:
        if view.has_spec:
            view.spec  # noqa: B018 - one that cannot be read is no job with a spec
            return view
        require_ours(client, run, slurm, which)
    except PermissionError:
        raise RunFolderError(f"{run.root} is its owner's (0700): do this as that user") from None
    with contextlib.suppress(SlurmError):  # no accounting, or none yet
        return replace(view, records=client.history(slurm.id) if slurm is not None else ())
    return view


def my_jobs(client: SlurmClient, user: str) -> tuple[JobView, ...]:
    """All jobs of a user that hydroslurm has a part in, and whose folder can be read; one question
    to Slurm."""
    views = (JobView(run_dir_of(job), job) for job in client.jobs(user=user))
    return tuple(view for view in views if _is_listed(view))


def _is_listed(view: JobView) -> bool:
    try:
        if view.has_spec:
            view.attempts  # noqa: B018 - without them no line can be written
            return view.submission is not None
        return bool(view.submission is not None or view.rank_files or view.run.events.is_dir())
    except (RunFolderError, OSError):
        return False


def require_ours(client: SlurmClient, run: RunDir, slurm: Job | None, which: str) -> None:
    """Require that hydroslurm has a part in a job, or in another element of its array: one that has
    not started has no run folder.

    Raises:
        RunFolderError: it has none.
    """
    if _is_ours(run) or (slurm is not None and member_of(slurm) is not None):
        return
    if slurm is not None and slurm.array_job_id is not None and slurm.state.is_waiting:
        others = client.jobs_of(JobId(slurm.array_job_id))
        if any(_is_ours(ranks_dir_of(one)) for one in others):
            return
    if slurm is None:
        raise RunFolderError(
            f"{run.root} is not a run folder: neither {run.events.name}/ nor "
            f"{run.submission_json.name} is in it"
        )
    why = " yet (%s): it has not come to its `import torch`, or hydroslurm is not in it"
    if slurm.state.has_ended:
        why = " (%s): hydroslurm was not in it"
    raise RunFolderError(
        f"job {which} has no run folder{why % run.root}. `scontrol show job {slurm.id}` says "
        "what Slurm knows; hydroslurm submit, or srun --preempt in the batch script, makes the "
        "next one preemptible"
    )


def _is_ours(run: RunDir) -> bool:
    """Whether it has been submitted, or has ranks or, of an elastic run, a coordinator."""
    return run.submission_json.exists() or run.events.is_dir() or run.elastic.is_dir()


def _job_of_folder(client: SlurmClient, run: RunDir) -> Job | None:
    asked, owner = JobView(run, None).submission, read_owner(run)  # an owner: of a default folder
    named = str(owner.job_id) if owner is not None else None
    if asked is not None:
        named = asked.job_id
    try:
        return find_job(client, JobId.parse(named)) if named is not None else None
    except (SlurmError, UsageError):
        return None


def find_jobs(client: SlurmClient, job_id: JobId) -> tuple[Job, ...]:
    """The job of an id, or all elements of an array; what slurmctld has forgotten as accounting has
    it, the latest record of each.

    Raises:
        NoSuchJob: the accounting does not know it either.
    """
    try:
        return client.jobs_of(job_id)
    except NoSuchJob as unknown:
        try:
            latest = {job.id: job for job in client.history(job_id)}
        except NoSuchJob:
            raise unknown from None
        return tuple(_commented(client, job) for job in latest.values())


def find_job(client: SlurmClient, job_id: JobId) -> Job:
    """The one job of an id, as :func:`find_jobs`.

    Raises:
        NoSuchJob: the accounting does not know it either.
        UsageError: it means all elements of an array.
    """
    found = find_jobs(client, job_id)
    (job, *others) = found
    if others or job.id.tasks or job_id == JobId(job.array_job_id or 0):
        listed = ", ".join(f"{one.id} ({one.state.value})" for one in found[:_MOST_LISTED])
        more = f" and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
        raise UsageError(
            f"{job_id} is a job array; name the element that you mean: {listed}{more}. "
            "Or pause, resume, requeue or cancel all of them with --all-elements"
        )
    return job


def _commented(client: SlurmClient, job: Job) -> Job:
    """The job with the comment that leads to its run folder. Accounting keeps comments only where
    AccountingStoreFlags says so, but always the command line of sbatch."""
    if job.comment:
        return job
    try:
        match = _SUBMITTED.fullmatch(client.submit_line(job))
    except SlurmError:
        match = None
    if match is None:
        return job
    return replace(job, comment=rundir.comment_for(RunDir(Path(match[1]))))
