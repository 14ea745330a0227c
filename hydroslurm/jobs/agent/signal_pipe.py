"""The signals of this process as numbers in a pipe that a thread can wait for."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """A stop was requested while there was no worker to forward it to.

    Not an Exception, because torch catches those on the way.
    """


class Departed(BaseException):
    """The member of an elastic run that this agent is leaves it, with this exit status.

    Not an Exception, for the same reason.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class SignalPipe:
    """Keeps signals from killing or stopping this process, and reports which ones came.

    Python's C handler writes the number at once, even while the main thread is inside a long call
    into torch. Open and close it in the main thread; only one other thread may :meth:`wait`.
    """

    def __init__(self, signals: Iterable[int], *, stops: Iterable[int] = ()) -> None:
        """``stops``: those that end an :meth:`interruptible` block."""
        self._signals = frozenset(signals)
        self._stops = frozenset(stops)
        self._interruptible = False
        self._before: dict[int, Any] = {}
        self._read_fd = self._write_fd = self._wakeup_before = -1

    def open(self) -> None:
        """Install the handlers; a second call takes back signals that somebody else took since."""
        if self._read_fd < 0:
            self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signo in self._signals:
            before = signal.signal(signo, self._arrived)
            self._before.setdefault(signo, before)
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, self._signals
        )  # blocked until now: autoload.hold

    def close(self, *, to_exit: bool = False) -> None:
        """Restore the previous handlers, and end :meth:`wait`.

        Args:
            to_exit: ignore the signals instead. Slurm sends SIGTERM twice, and srun once more when
                the first task has failed: it would kill a process that is about to exit with a
                status of its own.
        """
        for signo, before in self._before.items():
            kept = signal.SIG_DFL if before is None else before
            signal.signal(signo, signal.SIG_IGN if to_exit else kept)
        self._before.clear()
        if self._write_fd >= 0:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._write_fd)
            self._write_fd = -1

    def wait(self, timeout_s: float | None) -> list[int] | None:
        """The signals that came, in order; empty after ``timeout_s``, None after :meth:`close`."""
        watch = select.poll()  # select() cannot look at descriptors above 1023
        watch.register(self._read_fd, select.POLLIN)
        if not watch.poll(None if timeout_s is None else max(0.0, timeout_s * 1e3)):
            return []
        data = os.read(self._read_fd, 4096)
        if not data:
            os.close(self._read_fd)
            return None
        return [signo for signo in data if signo in self._signals]

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a stop that arrives inside the block end it.

        Raises:
            Interrupted: in the main thread, from the handler.
        """
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _arrived(self, signo: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._interruptible and signo in self._stops:
            raise Interrupted
