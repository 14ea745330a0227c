"""Calling sbatch: the run folder before, a clear error for a refusal, and a warning about a job
that can never start."""

from __future__ import annotations

import contextlib
import io
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import (
    LaunchError,
    RunFolderError,
    SlurmError,
    SlurmMissing,
    SlurmTimeout,
    UsageError,
)
from hydroslurm.slurm.programs import sbatch

if TYPE_CHECKING:  # what is not needed before sbatch has the job does not delay it
    from hydroslurm.slurm.client import Job, SlurmClient

Answer = TypeVar("Answer")

_MAYBE_TAKEN = ("timed out", "time out", "timeout", "zero bytes", "unexpected message", "killed")
"""In messages of sbatch that got no answer: slurmctld may have the job all the same."""
_SUBMITTED = re.compile(r"^Submitted batch job (\d+)", re.MULTILINE)
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


def call_sbatch(submit: Callable[[], Answer], run: RunDir, *, is_new: bool) -> Answer:
    """Let submitit call sbatch. A refusal is reported by the error alone, although submitit prints
    it.

    Args:
        run: the job's run folder.
        is_new: nothing else needs the run folder: remove it at a refusal, unless Slurm may have the
            job.

    Raises:
        LaunchError: sbatch refused the job, or did not confirm it.
    """
    from submitit.core import utils as submitit_utils  # a TrainingJob starts sooner without

    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            answer = submit()
    except (submitit_utils.FailedJobError, submitit_utils.FailedSubmissionError) as error:
        _print_stderr(stderr.getvalue().replace(str(error), ""))
        is_refused = isinstance(error, submitit_utils.FailedJobError)
        message = _refusal(str(error), run, is_refused=is_refused, is_new=is_new)
        raise LaunchError(message) from error
    except BaseException:
        _print_stderr(stderr.getvalue())
        raise
    _print_stderr(stderr.getvalue())
    return answer


def submit_script(script: Path, run: RunDir, *, is_new: bool) -> int:
    """Submit a batch script of our own; returns the job's id. sbatch's warnings go to stderr.

    Args:
        run, is_new: as for :func:`call_sbatch`.

    Raises:
        LaunchError: sbatch refused the job, or did not confirm it.
        SlurmMissing: there is no sbatch.
    """
    try:
        done = sbatch(script)
    except SlurmTimeout as error:
        raise LaunchError(_refusal(str(error), run, is_refused=False, is_new=is_new)) from error
    except SlurmMissing:
        if is_new:
            shutil.rmtree(run.root, ignore_errors=True)
        raise
    said = done.stderr.strip()
    found = _SUBMITTED.search(done.stdout)
    if done.returncode or found is None:
        message = said or done.stdout
        is_refused = done.returncode != 0
        raise LaunchError(_refusal(message, run, is_refused=is_refused, is_new=is_new))
    _print_stderr(said)
    return int(found[1])


@contextlib.contextmanager
def removing_on_refusal(base: Path) -> Iterator[None]:
    """At a refusal inside the block, remove the folder of run folders if it was created for it."""
    created = [path for path in (base, *base.parents) if not path.exists()]
    try:
        yield
    except (LaunchError, SlurmMissing):
        for path in created:
            with contextlib.suppress(OSError):  # not empty: Slurm may have that job
                path.rmdir()
        raise


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


def _refusal(said: str, run: RunDir, *, is_refused: bool, is_new: bool) -> str:
    """``is_refused``: sbatch said no, instead of nothing."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in _lines(said)]
    message = f"sbatch refused the job: {'; '.join(lines) or 'it gave no reason'}"
    if not is_refused or any(phrase in said.lower() for phrase in _MAYBE_TAKEN):
        return (
            f"{message}. Slurm may have it all the same: check squeue --me before you submit it "
            f"again. The request is in {run.root}"
        )
    if is_new:
        shutil.rmtree(run.root, ignore_errors=True)
        return f"{message}. Nothing is left of it in {run.root.parent}"
    return message


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
