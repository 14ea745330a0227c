"""submission.json: the intent before sbatch, the job id after it.

Replaced atomically, so that a crash between the two can be found later: an intent without an id may
have become a job, which its name identifies.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hydroslurm.core.decoding import decode
from hydroslurm.core.files import read_regular, write_atomically
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError

_MOST_BYTES = 16 << 20
"""A command may be long."""


@dataclass(frozen=True)
class Submission:
    """What Slurm was asked for.

    Attributes:
        name: the job's name.
        command: what each rank runs, to be shown.
        job_id: Slurm's, as submitit writes it (``12`` or ``12_3``); None before sbatch answered.
        replicas, backoff_limit: of a job with a spec, for whoever lists many jobs; None without.
    """

    name: str
    command: str
    job_id: str | None = None
    replicas: int | None = None
    backoff_limit: int | None = None


def write(run: RunDir, submission: Submission, *, durable: bool = True) -> None:
    """Put the file in place.

    Args:
        durable: False where the caller syncs it with others, before it calls sbatch.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    try:
        text = json.dumps(asdict(submission), indent=2) + "\n"
        write_atomically(run.submission_json, text, mode=0o666, durable=durable)
    except OSError as error:
        raise RunFolderError(f"cannot write {run.submission_json}: {error.strerror}") from error


def read(root: Path) -> Submission:
    """Read it back.

    Raises:
        RunFolderError: not there, or not one of ours.
    """
    path = RunDir(root).submission_json
    try:
        return decode(Submission, read_regular(path, limit_bytes=_MOST_BYTES))
    except OSError as error:
        raise RunFolderError(
            f"{root} is not a run folder: no {path.name} in it ({error.strerror})"
        ) from error
    except ValueError as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from error
