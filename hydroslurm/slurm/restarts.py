"""Requeueing a job from inside: only the attempt that Slurm knows of may.

A process of a dead attempt, of a node that did not answer for a while, can hear its SIGTERM when
the job runs again. ``scontrol requeue`` takes a job id, so that it would end the living attempt.
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


def requeue(client: SlurmClient, start: Start) -> None:
    """Have the job started again, unless it waits for that already. What is asked of Slurm first
    leaves a moment in which only somebody else's requeue and a whole start would have to fit.

    Raises:
        StaleAttempt: Slurm has started it again since; nothing was done.
        SlurmError: as of ``SlurmClient.requeue``.
    """
    job = client.job(start.job_id)
    check_newest(job, start)
    if not (job.restart_count > start.restart_count and is_pending(job)):
        client.requeue(start.job_id)


def check_newest(job: Job, start: Start) -> None:
    """Compare what Slurm says of a job with a start of it. Pure.

    While the processes of a requeued attempt are being ended Slurm counts one restart more already;
    the job is pending then. And a count of 0 may only be a variable that was lost (``srun
    --export=NONE``, containers): a process that began after the newest start is of no older one.

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
