"""Calling sbatch: the run folder before, a clear error for a refusal, and for a job that can never
start."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hydroslurm.core import rundir
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.trust import user_name
from hydroslurm.errors import (
    HydroslurmError,
    LaunchError,
    MaybeSubmitted,
    RunFolderError,
    SlurmError,
    SlurmTimeout,
    UsageError,
)
from hydroslurm.slurm.programs import sbatch, submitted

if TYPE_CHECKING:  # what is not needed before sbatch has the job does not delay it
    from hydroslurm.slurm.client import SlurmClient

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
        _remove(run or RunDir(base / "none"), created)
        if isinstance(error, LaunchError):
            raise LaunchError(f"{error}. Nothing is left of it in {base}") from error
        raise


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
    except (SlurmTimeout, KeyboardInterrupt) as error:
        said = str(error) or "it was interrupted"
        raise _failure(said, run, is_refused=False) from error
    said = done.stderr.strip()
    job_id = submitted(done.stdout)
    if job_id is None:
        raise _failure(said or done.stdout, run, is_refused=done.returncode != 0)
    if said:  # whatever the exit status: Slurm has it
        sys.stderr.write(f"{said}\n")
    return job_id


def refuse_hopeless(job_id: int, run: RunDir, *, janitor_id: int | None = None) -> None:
    """Cancel a job that was just submitted, with its run folder, if Slurm says that it can never
    start as things are.

    Args:
        janitor_id: the job that would clean up after it.

    Raises:
        LaunchError: it was cancelled.
        MaybeSubmitted: the user interrupted this.
    """
    from hydroslurm.slurm.text import format_duration

    try:
        client = _client()
        job = client.job(job_id)
        if not job.state.is_waiting or not _NEVER.fullmatch(job.reason):
            return
        for one in (janitor_id, job_id):
            if one is not None:
                client.cancel(client.job(one))
    except (SlurmError, UsageError):  # Slurm does not say
        return
    except KeyboardInterrupt as error:
        raise MaybeSubmitted(
            f"Slurm has the job, as {job_id}; it was interrupted while Slurm was asked whether the "
            f"job can start. Its run folder is {run.root}; `scancel {job_id}` takes it back"
        ) from error
    _remove(run, [run.root.parent])
    raise LaunchError(
        f"job {job_id} was cancelled, since it could never start ({job.reason}): it asked for "
        f"{_counted(job.n_nodes or 1)} of partition {job.partition}, time limit "
        f"{format_duration(job.time_limit_s)}. Lower what it asks for, or name another partition, "
        "QOS or account"
    )


def _remove(run: RunDir, made: list[Path]) -> None:
    """Remove a run folder, and those above it that were made for it, where they are empty."""
    shutil.rmtree(run.root, ignore_errors=True)
    for path in made:
        with contextlib.suppress(OSError):  # of another job
            path.rmdir()


def _failure(said: str, run: RunDir, *, is_refused: bool) -> LaunchError:
    """
    Args:
        said: what sbatch printed, or what came in its place.
        is_refused: sbatch said no, instead of nothing.
    """
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in _lines(said)]
    message = "; ".join(lines) or "it gave no reason"
    if is_refused and not any(part in said.lower() for part in _MAYBE_TAKEN):
        hint = _partitions() if _NO_PARTITION.search(message) else ""
        return LaunchError(f"sbatch refused the job: {message}{hint}")
    if (job := _job_of(run)) is not None:
        return MaybeSubmitted(
            f"Slurm has the job, as {job}, although its submission failed: {message}. The request "
            f"is in {run.root}; `scancel {job}` takes it back"
        )
    return MaybeSubmitted(
        f"sbatch did not confirm the job: {message}. Slurm may have it: check squeue --me "
        f"before you submit it again. The request is in {run.root}"
    )


def _partitions() -> str:
    """What may be asked for instead of a partition that there is not; "" if Slurm does not say."""
    try:
        names = [one.name for one in _client().partitions()]
    except (HydroslurmError, UsageError):
        return ""
    return (
        f". The partitions here are {', '.join(names)}; for a queue of a T9k manifest name one of "
        "them under queues in /etc/hydroslurm/config.yaml or ~/.config/hydroslurm/config.yaml"
    )


def _job_of(run: RunDir) -> int | None:
    """The id under which Slurm has the job of a run folder; None if it does not say so."""
    try:
        jobs = _client().jobs(user=user_name())
    except (HydroslurmError, UsageError):
        return None
    own = rundir.comment_for(run)
    found = (job.array_job_id or job.job_id for job in jobs if (job.comment or "").startswith(own))
    return next(found, None)


def _client() -> SlurmClient:
    """One that asks once."""
    from hydroslurm.slurm.client import RetryPolicy, open_client

    return open_client(retry_policy=RetryPolicy(call_timeout_s=_LOOK_S, give_up_after_s=0.0))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _counted(nodes: int) -> str:
    return f"{nodes} node{'' if nodes == 1 else 's'}"
