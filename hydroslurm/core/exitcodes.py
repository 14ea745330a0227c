"""Exit statuses that mean something to a batch script, and hooks at the process's exit."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

RUN_AGAIN = 75
"""Saved, not finished: the same command continues. sysexits' EX_TEMPFAIL. A batch script turns it
into a requeue where the rank could not do that itself."""

MUST_NOT_RUN_AGAIN = 93
"""A budget is spent, or attempts pass without progress: a requeue would not help. The number that
NVIDIA's resiliency extension ends with in the same case."""

FAILED = 1
"""Another rank failed, and srun or PMIx ended this one for it. Nothing brings the job back."""

CANCELLED = 143
"""Ended by a person, saved: 128 + SIGTERM, as a shell would say it."""


_status: Any = None


def leaves_with(status: Any) -> None:
    """Note the status with which the process is about to end, unless the exit is caught."""
    global _status
    _status = status


def left_with() -> Any:
    """The status that was noted last; None if none was."""
    return _status


def end_process(status: int) -> NoReturn:
    """End this process from another thread than its main one, and the workers that it has started:
    they may hang, too."""
    with contextlib.suppress(Exception):
        for child in multiprocessing.active_children():
            child.kill()
    os._exit(status)


# --- calls at the exit

_calls: list[tuple[int, Callable[[str], None]]] = []
_exit = sys.exit


def at_end(call: Callable[[str], None]) -> None:
    """Have this called as the process exits, in the order of these calls: with "" after a good end,
    else with its status or its error.

    An uncaught exception and :func:`sys.exit` with another status than 0 are noticed, and after a
    signal nothing is called; ``raise SystemExit(1)`` cannot be told from a successful exit.
    """
    if all(pid != os.getpid() for pid, _ in _calls):
        if multiprocessing.parent_process() is None:
            atexit.register(_end)
        else:  # exits through os._exit(), which skips atexit
            multiprocessing.util.Finalize(None, _end, exitpriority=0)
        sys.exit = _noting_exit
    _calls.append((os.getpid(), call))


def _end() -> None:
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    status = left_with()
    failed = "" if status in (None, 0) else f"status {status}"
    for pid, call in _calls:
        if pid == os.getpid():
            call(failed if error is None else type(error).__name__)
    _calls.clear()


def _noting_exit(status: Any = None, /) -> NoReturn:
    """``sys.exit`` that records its status, which nothing else reveals at exit."""
    if threading.current_thread() is threading.main_thread():
        leaves_with(status)
    _exit(status)


class ExitForRequeue(SystemExit):
    """Ends the process on purpose, with a status that says what is to follow."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        leaves_with(status)

    @classmethod
    def finished(cls) -> ExitForRequeue:
        """Nothing is left to do."""
        return cls(0)

    @classmethod
    def must_not_run_again(cls) -> ExitForRequeue:
        """A requeue would not help."""
        return cls(MUST_NOT_RUN_AGAIN)
