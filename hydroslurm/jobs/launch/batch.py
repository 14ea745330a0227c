"""The command of a batch script whose job saves, stops and is requeued: ``hydroslurm batch``.

Normally a rank requests the requeue itself. Its status says what is left to do: 75 means that it
saved but could not request it (its container has no scontrol, or the controller did not answer);
143, that SIGTERM killed it before its Run existed, in whose grace Slurm 22.05 would then count the
job as failed.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping

from hydroslurm.core.exitcodes import CANCELLED, RUN_AGAIN
from hydroslurm.core.fence import process_began_epoch_s
from hydroslurm.errors import HydroslurmError, StaleAttempt, UsageError, WrongJobState
from hydroslurm.runtime.autoload import PREEMPT_ENV, say
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import JobState, RetryPolicy, SlurmClient, open_client
from hydroslurm.slurm.policy import StopReason
from hydroslurm.slurm.stops import IN_GRACE, requeue, why_stopped

ONCE = RetryPolicy(give_up_after_s=0.0)
PATIENCE = RetryPolicy(first_delay_s=1.0, give_up_after_s=31.0)
"""How long Slurm is asked again, anew about the job each time: after a request without an answer
the job may be in the queue. Then it ends with the status of its ranks."""
FORWARDED = frozenset({signal.SIGTERM, signal.SIGURG, signal.SIGUSR1, signal.SIGUSR2})
"""Signals that ``--signal=B:`` and ``scancel --batch`` send to the batch shell alone."""


def run_batch(command: list[str], environ: Mapping[str, str]) -> int:
    """Run the command of a batch script, pass signals on to the job's steps, and requeue the job
    where its ranks could not; return the command's status.

    Signals wait in the mask of this thread until the loop takes them: none is lost before the
    command runs, and none interrupts a request to Slurm. SIGTERM is never sent to srun, which would
    kill the ranks while they save; they get theirs from Slurm.

    Raises:
        UsageError: this is no batch script of a job, or there is no such program.
    """
    allocation = _allocation(environ)
    program = shutil.which(command[0], path=environ.get("PATH"))
    if program is None:
        raise UsageError(f"there is no program {command[0]!r} on the PATH")
    given = {PREEMPT_ENV: "requeue", **environ}
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    ignored_by_python = [signal.SIGPIPE, signal.SIGXFSZ]
    try:
        child = os.posix_spawn(program, command, given, setsigmask=[], setsigdef=ignored_by_python)
    except OSError as error:
        raise UsageError(f"{program} cannot be run: {error.strerror}") from error
    while True:
        signo = signal.sigwait({*FORWARDED, signal.SIGCHLD})
        if signo != signal.SIGCHLD:
            _forward(signo, allocation, environ)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
    code = os.waitstatus_to_exitcode(status)
    return requeue_if_due(code if code >= 0 else 128 - code, environ)


def requeue_if_due(status: int, environ: Mapping[str, str]) -> int:
    """Requeue the job whose ranks ended with this status, unless somebody else does; return the
    status. A failure is one line on stderr.

    Raises:
        UsageError: this is no process of a job.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # a second SIGTERM comes 20 ms later
    allocation = _allocation(environ)
    if status not in (RUN_AGAIN, CANCELLED):
        return status
    try:
        client = open_client(environ=environ, retry_policy=ONCE)
        PATIENCE.retry(lambda: _requeue_if_due(status, allocation, client))
    except StaleAttempt as error:
        say(str(error))
    except WrongJobState as error:
        say(f"Slurm will not start this job again ({error}). Submit it again to go on")
    except HydroslurmError as error:
        say(f"the job is not requeued: {error}")
    return status


def _requeue_if_due(status: int, allocation: Allocation, client: SlurmClient) -> None:
    """Act on what Slurm says about the job.

    A cancelled job must not be requeued, which Slurm would do while its processes live: it is
    COMPLETING, like one that is requeued already and one whose time is over. Status 143 without a
    preemption: another rank failed, and srun ended the rest with SIGTERM.
    """
    job = client.job(allocation.job_id)
    stop = why_stopped(job, now_epoch_s=time.time())
    runs = job.state is JobState.RUNNING
    if status == RUN_AGAIN:
        is_due = runs or stop.reason is StopReason.TIME_LIMIT
    else:
        is_due = runs and stop.reason is StopReason.PREEMPTED
    if is_due:
        began_epoch_s = process_began_epoch_s(os.getppid())  # as old as the job's start, at least
        requeue(client, allocation, began_epoch_s=began_epoch_s, job=job)
        say(f"job {job.id} goes back into the queue ({stop.message}; status {status})")


def _forward(signo: int, allocation: Allocation, environ: Mapping[str, str]) -> None:
    """Send a signal to all steps of the job; those of one that is being ended have had theirs."""
    try:
        client = open_client(environ=environ, retry_policy=IN_GRACE)
        job = client.job(allocation.job_id)
        if job.state is JobState.RUNNING:
            client.signal(job, signo)
    except HydroslurmError as error:
        say(f"{signal.Signals(signo).name} was not passed on to the ranks: {error}")


def _allocation(environ: Mapping[str, str]) -> Allocation:
    allocation = Allocation.from_environ(environ)
    if allocation is None:
        raise UsageError(
            "there is no job here (SLURM_JOB_ID is not set). This is the last line of a batch "
            "script: submit that with sbatch"
        )
    return allocation
