"""When a run is finished, and finished.json, the marker that makes a restart exit at once.

Slurm 25.11 requeues a preempted job whatever its exit status, including one that finished its
training within the grace; without the marker everything after the training would run again.

A run is finished when its training is done *and* the process that did it exits with status 0. What
a script does after its ``with Run`` block (an export, say) belongs to the job and has no safe
points, so the marker is written when the interpreter shuts down. After any other exit there is
none: the next start trains nothing, and repeats that last part.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.core.exitcodes import at_end
from hydroslurm.core.fence import Fence
from hydroslurm.core.files import parse_json, read_regular, write_atomically
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.trust import check_trusted
from hydroslurm.errors import RunFolderError, UntrustedFile, UsageError
from hydroslurm.training.reporting import warning

_LIMIT_BYTES = 4096


def write(run: RunDir, *, step: int) -> None:
    """Write the marker, durably.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    path = run.finished_json
    content = json.dumps({"v": 1, "step": step, "epoch_ns": time.time_ns()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, mode=0o644, durable=True)
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error


def remove(run: RunDir) -> None:
    """Remove the marker, for a run that starts over.

    Raises:
        RunFolderError: it cannot be removed.
    """
    try:
        run.finished_json.unlink(missing_ok=True)
    except OSError as error:
        raise RunFolderError(f"cannot remove {run.finished_json}: {error.strerror}") from error


def step_of(run: RunDir) -> int | None:
    """The step at which a run was finished, None when it is not. A marker that another user may
    have written is ignored with a warning.

    Raises:
        RunFolderError: it exists and cannot be read.
    """
    try:
        check_trusted(run.finished_json, what="the marker", shared=True)
        return int(parse_json(read_regular(run.finished_json, limit_bytes=_LIMIT_BYTES))["step"])
    except FileNotFoundError:
        return None
    except UntrustedFile as error:
        warnings.warn(
            f"hydroslurm: {error}. It says that this run has finished; it is ignored, and the "
            "run continues",
            RuntimeWarning,
            stacklevel=1,  # from one place, so that Python says it once
        )
        return None
    except OSError as error:
        raise RunFolderError(f"the run folder {run.root}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{run.finished_json} cannot be read ({error}). Remove it to train on"
        ) from error


@dataclass(frozen=True)
class _Trained:
    """A run whose training is done, in this process."""

    pid: int
    run: RunDir
    step: int
    fence: Fence
    others: Callable[[], bool]


_trained: dict[Path, _Trained] = {}


def at_good_end(run: RunDir, *, step: int, fence: Fence, others: Callable[[], bool]) -> None:
    """Write the marker of a run once this process exits with status 0; see
    :func:`hydroslurm.core.exitcodes.at_end`.

    Args:
        others: asked then: whether all other ranks that have to have ended well, too.
    """
    if not _trained:
        at_end(settle)
    _trained[run.root] = _Trained(os.getpid(), run, step, fence, others)


def next_unfinished(run: RunDir) -> RunDir:
    """The folder itself, or the first ``fit-N`` in it in which this process has not finished."""
    number, found = 1, run
    while found.root in _trained and _trained[found.root].pid == os.getpid():
        number += 1
        found = RunDir(run.root / f"fit-{number}")
    return found


def require_unfinished(run: RunDir) -> None:
    """Check that a Run may be created in a folder.

    Raises:
        UsageError: another one has finished there in this process: a restart of the first would
            load what the second has saved.
    """
    done = _trained.get(run.root)
    if done is not None and done.pid == os.getpid():
        raise UsageError(
            f"this process has already finished a Run in {run.root}, and a folder belongs to one "
            "run. Give each of two consecutive runs its own: "
            f'Run(directory="{run.root}/second", ...)'
        )


def settle(problem: str = "") -> None:
    """Write the markers as the process exits, or log why not."""
    for done in [one for one in _trained.values() if one.pid == os.getpid()]:
        del _trained[done.run.root]
        if not done.run.root.is_dir():  # a folder that was made for this process only
            continue
        if problem or not done.others():
            why = f"the process ends with {problem}" if problem else "another rank ends otherwise"
            warning(
                f"the training in {done.run.root} is done, but {why}: a restart repeats what "
                "follows the training"
            )
            continue
        try:
            done.fence.check("the end of the run")
            write(done.run, step=done.step)
        except Exception as error:  # an exit status cannot be changed any more
            warning(f"finished.json could not be written, so a restart repeats the end: {error}")
