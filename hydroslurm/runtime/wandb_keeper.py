"""Start ``wandb-core`` where the signals that Slurm sends to a rank do not reach it.

It holds what the rank has logged to Weights & Biases, and dies of SIGTERM: the rank then fails at
its next log, in the middle of a stop, and what was not yet in its file is lost (seen). Blocking the
signals, as :mod:`hydroslurm.runtime.children` does, has no effect: it is written in Go, whose
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
import sys
import time

_PARENT = "--pid"
_LOOK_EVERY_S = 0.2


def main(argv: list[str]) -> int:
    """Be the process in front. Returns the program's exit status; 1 if it is unknown."""
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
