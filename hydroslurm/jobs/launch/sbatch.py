"""Calling sbatch: the run folder before, a clear error for a refusal, and a warning about a job
that can never start."""

from __future__ import annotations

import contextlib
import getpass
import io
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hydroslurm.core import rundir
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import (
    HydroslurmError,
    LaunchError,
    MaybeSubmitted,
    RunFolderError,
    SlurmError,
    SlurmTimeout,
    UsageError,
)
from hydroslurm.slurm.programs import is_passed_on, sbatch, submitted

if TYPE_CHECKING:  # what is not needed before sbatch has the job does not delay it
    from hydroslurm.slurm.client import Job, SlurmClient

Answer = TypeVar("Answer")

_MAYBE_TAKEN = ("timed out", "time out", "timeout", "zero bytes", "unexpected message", "killed")
"""In messages of sbatch that got no answer: slurmctld may have the job all the same."""
_LOOK_S = 10.0
"""How long Slurm is asked whether it has a job after all."""
_NO_PARTITION = re.compile(r"invalid partition", re.IGNORECASE)
_NEVER = re.compile(
    r"PartitionConfig|PartitionNodeLimit|PartitionTimeLimit|BadConstraints|InvalidAccount"
    r"|InvalidQOS|(?:Assoc|QOS)\w*PerJob(?:Limit)?|QOSMin\w+"
)
"""Reasons of a pending job that do not go away when other jobs end."""


def new_run(base: Path, name: str) -> RunDir:
    """Create a run folder with a unique name; the newest sorts last.

    Raises:
        RunFolderError: it cannot be created there.
    """
    odd = next((c for c in str(base) if c in "%\\" or not c.isprintable()), None)
    if odd is not None:
        raise RunFolderError(
            f"run folders cannot be created in {str(base)!r}: Slurm would not take {odd!r} in the "
            "name of a log file literally. Choose another folder (--folder)"
        )
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:40].strip("-.") or "job"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return RunDir(base / f"{stamp}-{safe}-{secrets.token_hex(2)}").create()


@contextlib.contextmanager
def new_submission(base: Path, name: str) -> Iterator[RunDir]:
    """A new run folder for a job that the block submits. When the block raises, the folder is gone
    again, with those above it that were made for it, unless Slurm may have the job.

    Raises:
        RunFolderError: as :func:`new_run`.
    """
    created = [path for path in (base, *base.parents) if not path.exists()]
    run: RunDir | None = None
    try:
        run = new_run(base, name)
        yield run
    except MaybeSubmitted:
        raise
    except Exception as error:
        if run is not None:
            shutil.rmtree(run.root, ignore_errors=True)
        for path in created:
            with contextlib.suppress(OSError):  # not empty: of another job
                path.rmdir()
        if isinstance(error, LaunchError):
            raise LaunchError(f"{error}. Nothing is left of it in {base}") from error
        raise


def call_sbatch(submit: Callable[[], Answer], run: RunDir) -> Answer:
    """Let submitit call sbatch. A refusal is reported by the error alone, although submitit prints
    it.

    Args:
        run: the job's run folder.

    Raises:
        LaunchError: sbatch refused the job.
        MaybeSubmitted: it did not confirm it, or something failed after that.
    """
    from submitit.core import utils as submitit_utils  # a TrainingJob starts sooner without

    stderr = io.StringIO()
    kept_back = {name: os.environ.pop(name) for name in list(os.environ) if not is_passed_on(name)}
    try:
        with contextlib.redirect_stderr(stderr):
            answer = submit()
    except (submitit_utils.FailedJobError, submitit_utils.FailedSubmissionError) as error:
        _print_stderr(stderr.getvalue().replace(str(error), ""))
        is_refused = isinstance(error, submitit_utils.FailedJobError)
        answered = getattr(error.__cause__, "output", "")
        raise _failure(str(error), answered, run, is_refused=is_refused) from error
    except BaseException as error:
        _print_stderr(stderr.getvalue())
        if isinstance(error, Exception) and any(run.logs.glob("*submission*.sh")):
            raise _failure(str(error), "", run, is_refused=False) from error
        raise
    finally:
        os.environ.update(kept_back)
    _print_stderr(stderr.getvalue())
    return answer


def submit_script(script: Path, run: RunDir) -> int:
    """Submit a batch script of our own; returns the job's id. sbatch's warnings go to stderr.

    Args:
        run: the job's run folder.

    Raises:
        LaunchError: sbatch refused the job.
        MaybeSubmitted: it did not confirm it.
        SlurmMissing: there is no sbatch.
    """
    try:
        done = sbatch(script)
    except SlurmTimeout as error:
        raise _failure(str(error), "", run, is_refused=False) from error
    said = done.stderr.strip()
    job_id = submitted(done.stdout)
    if job_id is None:
        raise _failure(said or done.stdout, "", run, is_refused=done.returncode != 0)
    _print_stderr(said)  # whatever the exit status: Slurm has it
    return job_id


def never_starts(client: SlurmClient, job_id: int, *, nodes: int) -> str | None:
    """Why a job that was just submitted can never start as things are; None if that is unknown.
    Does not raise if Slurm fails: the job is submitted.

    Args:
        nodes: how many it asked for.
    """
    from hydroslurm.slurm.policy import find_partition
    from hydroslurm.slurm.text import format_duration

    try:
        job = client.job(job_id)
        if not job.state.is_waiting:
            return None
        partition = find_partition(client.partitions(), job.partition)
    except (SlurmError, UsageError):
        return None
    several = "," in job.partition
    too_many = not several and len(partition.nodes) < nodes
    if not too_many and not _NEVER.fullmatch(job.reason):
        return None
    limit = format_duration(partition.max_time_s)
    has = f"partition {partition.name} has {_counted(len(partition.nodes))}, time limit {limit}"
    return (
        f"job {job_id} can never start as things are{_because(job)}: it asks for "
        f"{_counted(nodes)}, time limit {format_duration(job.time_limit_s)}"
        f"{'' if several else f'; {has}'}. To cancel it: scancel {job_id}"
    )


def _failure(said: str, answered: str, run: RunDir, *, is_refused: bool) -> LaunchError:
    """
    Args:
        said: the error. answered: what sbatch printed.
        is_refused: sbatch said no, instead of nothing.
    """
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in _lines(said)]
    message = "; ".join(lines) or "it gave no reason"
    job_id = submitted(answered)
    if job_id is None and is_refused and not any(part in said.lower() for part in _MAYBE_TAKEN):
        hint = _partitions() if _NO_PARTITION.search(message) else ""
        return LaunchError(f"sbatch refused the job: {message}{hint}")
    if (job := job_id or _job_of(run)) is not None:
        return MaybeSubmitted(
            f"Slurm has the job, as {job}, although its submission failed: {message}. The request "
            f"is in {run.root}; `scancel {job}` takes it back"
        )
    return MaybeSubmitted(
        f"sbatch refused the job: {message}. Slurm may have it all the same: check squeue --me "
        f"before you submit it again. The request is in {run.root}"
    )


def _partitions() -> str:
    """What may be asked for instead of a partition that there is not; "" if Slurm does not say."""
    from hydroslurm.slurm.client import RetryPolicy, open_client

    patience = RetryPolicy(call_timeout_s=_LOOK_S, give_up_after_s=0.0)
    try:
        names = [one.name for one in open_client(retry_policy=patience).partitions()]
    except (HydroslurmError, UsageError):
        return ""
    return (
        f". The partitions here are {', '.join(names)}; for a queue of a T9k manifest name one of "
        "them under queues in /etc/hydroslurm/config.yaml or ~/.config/hydroslurm/config.yaml"
    )


def _job_of(run: RunDir) -> int | None:
    """The id under which Slurm has the job of a run folder; None if it does not say so."""
    from hydroslurm.slurm.client import RetryPolicy, open_client

    patience = RetryPolicy(call_timeout_s=_LOOK_S, give_up_after_s=0.0)
    try:
        jobs = open_client(retry_policy=patience).jobs(user=getpass.getuser())
    except (HydroslurmError, UsageError, KeyError):
        return None
    own = rundir.comment_for(run)
    found = (job.array_job_id or job.job_id for job in jobs if (job.comment or "").startswith(own))
    return next(found, None)


def _because(job: Job) -> str:
    return f" ({job.reason})" if _NEVER.fullmatch(job.reason) else ""


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _print_stderr(message: str) -> None:
    """Print what others wrote to stderr meanwhile."""
    if message.strip():
        sys.stderr.write(message.strip() + "\n")


def _counted(nodes: int) -> str:
    return f"{nodes} node{'' if nodes == 1 else 's'}"
