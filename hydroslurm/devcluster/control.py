"""How a supervisor is told to end, and how it waits for anything else."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable

from hydroslurm.devcluster.daemons import Daemon
from hydroslurm.errors import ClusterError

STAY = b"stay\n"
"""What a caller says down its pipe before it closes it, when the cluster shall outlive it."""

_ENDING = (signal.SIGTERM, signal.SIGINT)


class StopRequested(Exception):
    """The cluster shall end now: its caller is gone, or somebody asked for it."""


class Control:
    """Watches the caller's pipe, the caller itself and the signals to this process.

    The pipe alone is not enough: a child that the caller forked holds its end open too, and may
    live longer. So the caller is watched by a pidfd as well, where the kernel has them.
    """

    def __init__(self, *, lifeline: int, caller_pid: int) -> None:
        self._lifeline = lifeline
        self._caller = _open_pid(caller_pid)
        self._wake_up, write_end = os.pipe()
        for end in (self._wake_up, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for signo in (*_ENDING, signal.SIGCHLD):
            signal.signal(signo, _nothing)  # the wake-up pipe carries the number
        self._watched = {self._wake_up, lifeline} | ({self._caller} - {-1})

    def wait(self, limit_s: float) -> None:
        """Sleep for so long, or until a child ends.

        Raises:
            StopRequested: the cluster shall end.
        """
        ready, _, _ = select.select(sorted(self._watched), [], [], limit_s)
        if self._lifeline in ready:
            self._hear(os.read(self._lifeline, 4096))
        if self._caller in ready and self._caller in self._watched:
            raise StopRequested("the caller is gone")
        if self._wake_up in ready and set(os.read(self._wake_up, 4096)) & set(_ENDING):
            raise StopRequested("asked to end")

    def until(
        self,
        condition: Callable[[], bool],
        what: str,
        *,
        daemons: Iterable[Daemon] = (),
        limit_s: float = 60.0,
    ) -> None:
        """Wait for a condition.

        Raises:
            StopRequested: the cluster shall end.
            ClusterError: one of the daemons ended, or the time is over.
        """
        watched = tuple(daemons)
        deadline = time.monotonic() + limit_s
        while not condition():
            for daemon in watched:
                daemon.check()
            if time.monotonic() > deadline:
                tails = "\n".join(daemon.tail_words() for daemon in watched)
                raise ClusterError(f"waited {limit_s:g} s for {what}.\n{tails}")
            self.wait(0.02)

    def _hear(self, said: bytes) -> None:
        if not said.startswith(STAY):
            raise StopRequested("the caller is gone")
        self._watched -= {self._lifeline, self._caller}


def _nothing(_signo: int, _frame: object) -> None:
    """Must be a handler of ours: without one no number is written to the wake-up pipe."""


def _open_pid(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1
