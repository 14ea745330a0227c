"""Requeueing a job from inside: only the attempt that is current for Slurm may.

A process of a dead attempt, on a node that did not respond for a while, may get its SIGTERM when
the job already runs again. ``scontrol requeue`` takes a job id, so it would end the living attempt.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydroslurm.errors import StaleAttempt
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.stops import is_pending
from hydroslurm.slurm.values import Job


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a job, as one of its processes knows it.

    Attributes:
        restart_count: SLURM_RESTART_COUNT of its environment, 0 without that.
        began_epoch_s: when the process was started.
    """

    job_id: int
    restart_count: int
    began_epoch_s: float


def requeue(client: SlurmClient, start: Start, *, job: Job | None = None) -> None:
    """Requeue the job, unless it is already pending.

    Args:
        job: as slurmctld has just described it, where it was asked anyway.

    This could only hit the wrong attempt if somebody else's requeue and a whole start of the job
    happened between the check and the request.

    Raises:
        StaleAttempt: Slurm has started it again since; nothing was done.
        SlurmError: as of ``SlurmClient.requeue``.
    """
    if job is None:
        job = client.job(start.job_id)
    check_newest(job, start)
    if not (job.restart_count > start.restart_count and is_pending(job)):
        client.requeue(start.job_id)


def check_newest(job: Job, start: Start) -> None:
    """Compare a start of a job with what Slurm says about the job. Pure.

    While a requeued attempt is being ended, Slurm already counts the next restart; the job is
    pending then. A count of 0 may be a lost variable (``srun --export=NONE``, containers): a
    process that began after the newest start belongs to no older one.

    Raises:
        StaleAttempt: the start is over, and the job runs, or ran, without it.
    """
    is_older = job.restart_count > start.restart_count and not is_pending(job)
    if is_older and (job.start_epoch_s is None or start.began_epoch_s < job.start_epoch_s):
        raise StaleAttempt(
            f"job {start.job_id} is not requeued: Slurm has started it {job.restart_count} times "
            f"again (it is {job.state.value}), and this process is of its restart "
            f"{start.restart_count}. The attempt that runs is left alone"
        )
