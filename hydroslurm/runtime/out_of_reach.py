"""Start ``wandb-core`` where the signals that Slurm sends to a rank do not reach it.

It holds what the rank has logged to Weights & Biases, and dies of SIGTERM: the rank then fails at
its next log, in the middle of a stop, and what was not yet in its file is lost (seen). Blocking the
signals, as :mod:`hydroslurm.runtime.child_signals` does, has no effect: it is written in Go, whose
runtime unblocks what a program asks for.

proctrack/linuxproc and ``scancel --full`` go from parent to child. So its parent becomes an orphan:

    rank -> a process in front, with the signals blocked, which ends as the program does
            (an orphan) a keeper, which ends with the rank -> wandb-core

``wandb-core`` looks whether its parent is the process that it was told, and ends when it is not:
it is told the keeper. In a cgroup all of them stay where they are.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

_PROGRAMS = frozenset({"wandb-core"})
_PARENT = "--pid"
_LOOK_EVERY_S = 0.2


class OutOfReach:
    """Has :mod:`subprocess` start such programs in this way."""

    def __init__(self, signals: Iterable[int]) -> None:
        """
        Args:
            signals: that are not to end them.
        """
        self._signals = frozenset(signals)
        self._original: Any = None
        self._wrapper: Any = None

    def install(self) -> None:
        original = subprocess.Popen._execute_child  # type: ignore[attr-defined]

        def start(popen: Any, argv: Any, *rest: Any) -> Any:
            if self._wrapper is None or not _is_such(argv):
                return original(popen, argv, *rest)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
            try:
                return original(popen, [sys.executable, "-I", "-S", __file__, *argv], *rest)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        self._original, self._wrapper = original, start
        subprocess.Popen._execute_child = start  # type: ignore[attr-defined]

    def uninstall(self) -> None:
        """Put the original back; if somebody has wrapped it again since, pass calls through."""
        if subprocess.Popen._execute_child is self._wrapper:  # type: ignore[attr-defined]
            subprocess.Popen._execute_child = self._original  # type: ignore[attr-defined]
        self._wrapper = None


def _is_such(argv: Any) -> bool:
    if not isinstance(argv, (list, tuple)) or not argv or _PARENT not in argv:
        return False
    name = os.path.basename(os.fsdecode(argv[0]))  # noqa: PTH119 - pathlib is imported for nothing else
    return name in _PROGRAMS


def main(argv: list[str]) -> int:
    """Be the process in front. Returns what the program has ended with; 1 if nobody knows."""
    rank = os.getppid()
    here, there = os.pipe()
    if os.fork() == 0:
        os.close(here)
        if os.fork() == 0:
            _keep(rank, argv, there)
        os._exit(0)
    os.close(there)
    os.wait()
    code = os.read(here, 8)  # at the keeper's end, too
    return int(code or b"1")


def _keep(rank: int, argv: list[str], there: int) -> None:
    """Be the keeper."""
    parent = argv.index(_PARENT) + 1
    argv = [*argv[:parent], str(os.getpid()), *argv[parent + 1 :]]
    pid = os.fork()
    if pid == 0:
        os.close(there)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            os.execv(argv[0], argv)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error}\n".encode())
        os._exit(127)
    _wait_for_either(pid, rank)
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        os.write(there, b"%d" % (os.waitstatus_to_exitcode(status) % 256))
    os._exit(0)


def _wait_for_either(child: int, other: int) -> None:
    """Until one of the two processes has ended."""
    try:
        ends = [os.pidfd_open(child), os.pidfd_open(other)]
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # before Linux 5.3
        while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if not os.path.exists(f"/proc/{other}"):  # noqa: PTH110 - no import of pathlib
                return
            time.sleep(_LOOK_EVERY_S)
        return
    select.select(ends, [], [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
