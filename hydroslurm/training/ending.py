"""When a run is done: its training is, and the process that has done it ends well.

What a script does behind its ``with Run`` block, an export say, belongs to the job, and has no safe
points. So the marker that lets a restart leave at once is put in place when the interpreter shuts
down. Without such an end there is none: the next start trains nothing, and does that part again.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydroslurm.core.exitcodes import leaves_with, left_with
from hydroslurm.core.fence import Fence
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import UsageError
from hydroslurm.training import finished
from hydroslurm.training.notice import notice


@dataclass(frozen=True)
class _Trained:
    """A run whose training is done."""

    pid: int
    run: RunDir
    step: int
    fence: Fence


_trained: dict[Path, _Trained] = {}
_exit = sys.exit


def at_good_end(run: RunDir, *, step: int, fence: Fence) -> None:
    """Put the marker of a run in place once this process ends with status 0.

    An uncaught exception and :func:`sys.exit` with another status are seen, and a signal ends the
    process without asking; ``raise SystemExit(1)`` cannot be told from a good end.
    """
    if not _trained:
        if multiprocessing.parent_process() is None:
            atexit.register(settle)
        else:  # leaves by os._exit(), which calls nobody
            multiprocessing.util.Finalize(None, settle, exitpriority=0)
        sys.exit = _noting_exit
    _trained[run.root] = _Trained(os.getpid(), run, step, fence)


def require_unfinished(run: RunDir) -> None:
    """Whether a Run may be made in a folder.

    Raises:
        UsageError: another one has finished there in this process: the restart of the first would
            load what the second has saved.
    """
    done = _trained.get(run.root)
    if done is not None and done.pid == os.getpid():
        raise UsageError(
            f"a Run has finished in {run.root} already, in this process, and a folder is that of "
            "one run. Give each of two in sequence its own: "
            f'Run(directory="{run.root}/second", ...)'
        )


def settle() -> None:
    """The process ends: write the markers, or say why not."""
    for done in [one for one in _trained.values() if one.pid == os.getpid()]:
        del _trained[done.run.root]
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        status = left_with()
        if error is not None or status not in (None, 0):
            why = type(error).__name__ if error is not None else f"status {status}"
            notice(
                f"the training of {done.run.root} is done, and the process ends with {why}: a "
                "restart does what follows the training again"
            )
            continue
        try:
            done.fence.check("the end of the run")
            if done.run.root.is_dir():
                finished.write(done.run, step=done.step)
        except Exception as problem:  # an exit status cannot be changed any more
            notice(f"the end of the run is not written down, and a restart finds out: {problem}")


def _noting_exit(status: Any = None, /) -> NoReturn:
    """``sys.exit`` that remembers with what it was called: nothing else tells the status."""
    if threading.current_thread() is threading.main_thread():
        leaves_with(status)
    _exit(status)
