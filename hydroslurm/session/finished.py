"""finished.json: the marker that makes a restart leave at once.

Slurm 25.11 requeues a preempted job whatever it ended with, also one that finished its training
inside the grace; without the marker that would be trained again.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass

from hydroslurm.errors import RunFolderError
from hydroslurm.rundir import RunDir


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
    temporary = path.with_suffix(f".tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w") as file:
            json.dump({"v": 1, "step": step, "epoch_ns": time.time_ns()}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fd = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error


def step_of(run: RunDir) -> int | None:
    """At which step a run was done, None when it is not; as :func:`read`."""
    done = read(run)
    return None if done is None else done.step


def read(run: RunDir) -> Finished | None:
    """The marker, None when the run has not finished.

    Raises:
        RunFolderError: it is there and cannot be read.
    """
    try:
        row = json.loads(run.finished_json.read_text())
        return Finished(step=int(row["step"]), epoch_ns=int(row["epoch_ns"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{run.finished_json} cannot be read ({error}). Remove it to train on"
        ) from error
