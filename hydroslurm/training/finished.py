"""finished.json: the marker that makes a restart leave at once.

Slurm 25.11 requeues a preempted job whatever it ended with, also one that finished its training
inside the grace; without the marker what follows the training would be done again. ``ending`` says
when it is written.
"""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import dataclass

from hydroslurm.core.files import parse_json, read_regular, write_atomically
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.trust import check_trusted
from hydroslurm.errors import RunFolderError, UntrustedFile

_LIMIT_BYTES = 4096


@dataclass(frozen=True)
class Finished:
    """When and where a run was done."""

    step: int
    epoch_ns: int


def write(run: RunDir, *, step: int) -> None:
    """Put the marker in place, durably.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    path = run.finished_json
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"v": 1, "step": step, "epoch_ns": time.time_ns()}
        write_atomically(path, json.dumps(row), mode=0o644, durable=True)
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error


def remove(run: RunDir) -> None:
    """Take the marker away, for a run that begins anew.

    Raises:
        RunFolderError: it cannot be removed.
    """
    try:
        run.finished_json.unlink(missing_ok=True)
    except OSError as error:
        raise RunFolderError(f"cannot remove {run.finished_json}: {error.strerror}") from error


def step_of(run: RunDir) -> int | None:
    """At which step a run was done, None when it is not; as :func:`read`."""
    done = read(run)
    return None if done is None else done.step


def read(run: RunDir) -> Finished | None:
    """The marker, None when the run has not finished. One that somebody else may have put there
    costs a warning, and counts for nothing.

    Raises:
        RunFolderError: it is there and cannot be read.
    """
    try:
        check_trusted(run.finished_json, what="the marker", shared=True)
        row = parse_json(read_regular(run.finished_json, limit_bytes=_LIMIT_BYTES))
        return Finished(step=int(row["step"]), epoch_ns=int(row["epoch_ns"]))
    except FileNotFoundError:
        return None
    except UntrustedFile as error:
        warnings.warn(
            f"hydroslurm: {error}. It says that this run has finished; the run goes on as if it "
            "were not there",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{run.finished_json} cannot be read ({error}). Remove it to train on"
        ) from error
