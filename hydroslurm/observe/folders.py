"""Where the ranks of a job write, as far as Slurm's answer tells."""

from __future__ import annotations

from collections.abc import Sequence

from hydroslurm.core import rundir
from hydroslurm.core.rundir import RunDir
from hydroslurm.slurm.run_folders import run_dirs_of
from hydroslurm.slurm.values import Job


def run_dir_of(job: Job) -> RunDir:
    """The run folder of a job, whether it was started by ``hydroslurm submit`` or by srun alone; of
    several trainings, that of the one which was last at work."""
    return newest_of(run_dirs_of(job))


def newest_of(folders: Sequence[RunDir]) -> RunDir:
    """The one of these run folders whose training was last at work."""
    return folders[0] if len(folders) == 1 else max(folders, key=_last_told_ns)


def _last_told_ns(run: RunDir) -> int:
    try:
        return run.rank_status(0).stat().st_mtime_ns
    except OSError:
        return 0


def member_of(job: Job) -> tuple[RunDir, str] | None:
    """The elastic run that this array element is a member of, and the member's name; None of any
    other job."""
    run = rundir.elastic_run_of(job.comment)
    return None if run is None or job.array_task_id is None else (run, str(job.id))


def ranks_dirs_of(job: Job) -> tuple[RunDir, ...]:
    """Where the ranks of all its trainings write: its run folders, or its member's part of that of
    an elastic run."""
    if (member := member_of(job)) is not None:
        run, name = member
        return (RunDir(run.elastic / "members" / name),)
    return run_dirs_of(job)


def ranks_dir_of(job: Job) -> RunDir:
    """The same of the training that was last at work."""
    return newest_of(ranks_dirs_of(job))
