"""What sbatch refuses, said once; and what it takes though it can never start."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from submitit.core import utils as submitit_utils

from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import LaunchError, SlurmError, UsageError
from hydroslurm.slurm.client import Job, SlurmClient
from hydroslurm.slurm.policy import find_partition
from hydroslurm.slurm.text import format_duration

Answer = TypeVar("Answer")

_MAYBE_TAKEN = ("timed out", "time out", "timeout", "zero bytes", "unexpected message", "killed")
"""In such words sbatch says that no answer came; slurmctld may have the job all the same."""
_NEVER = re.compile(
    r"PartitionConfig|PartitionNodeLimit|PartitionTimeLimit|BadConstraints|InvalidAccount"
    r"|InvalidQOS|(?:Assoc|QOS)\w*PerJob(?:Limit)?|QOSMin\w+"
)
"""Reasons of a pending job that no end of another job takes away."""


def call_sbatch(submit: Callable[[], Answer], run: RunDir, *, is_new: bool) -> Answer:
    """Let submitit call sbatch. A refusal is said in the error alone, which submitit prints, too.

    Args:
        run: what was written for the job.
        is_new: nothing else needs the run folder, so that a refusal removes it; it stays where
            Slurm may have the job.

    Raises:
        LaunchError: sbatch refused it, or did not say that it has it.
    """
    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard):
            answer = submit()
    except (submitit_utils.FailedJobError, submitit_utils.FailedSubmissionError) as error:
        _pass_on(heard.getvalue().replace(str(error), ""))
        raise LaunchError(_refusal(error, run, is_new=is_new)) from error
    except BaseException:
        _pass_on(heard.getvalue())
        raise
    _pass_on(heard.getvalue())
    return answer


@contextlib.contextmanager
def removing_on_refusal(base: Path) -> Iterator[None]:
    """A refusal inside leaves nothing of the folder of run folders where that was made for it."""
    made = [path for path in (base, *base.parents) if not path.exists()]
    try:
        yield
    except LaunchError:
        for path in made:
            with contextlib.suppress(OSError):  # what Slurm may have stays in it
                path.rmdir()
        raise


def never_starts(client: SlurmClient, job_id: int, *, nodes: int) -> str | None:
    """Why a job that was just submitted can never start as things are; None where that is not
    known. Never raises for Slurm's sake: the job is submitted.

    Args:
        nodes: what it asked for.
    """
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


def _refusal(error: Exception, run: RunDir, *, is_new: bool) -> str:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in _lines(str(error))]
    said = f"sbatch refused the job: {'; '.join(lines) or 'it gave no reason'}"
    told = str(error).lower()
    is_refused = isinstance(error, submitit_utils.FailedJobError)
    if not is_refused or any(words in told for words in _MAYBE_TAKEN):
        return (
            f"{said}. Slurm may have it all the same: look with squeue --me before you submit it "
            f"again. What was asked for is in {run.root}"
        )
    if is_new:
        shutil.rmtree(run.root, ignore_errors=True)
        return f"{said}. Nothing is left of it in {run.root.parent}"
    return said


def _because(job: Job) -> str:
    return f" ({job.reason})" if _NEVER.fullmatch(job.reason) else ""


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _pass_on(message: str) -> None:
    """What others wrote on stderr meanwhile."""
    if message.strip():
        sys.stderr.write(message.strip() + "\n")


def _counted(nodes: int) -> str:
    return f"{nodes} node{'' if nodes == 1 else 's'}"
