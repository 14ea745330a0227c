"""The signals that this process gets, as lines in a pipe that a thread can wait for."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """A stop was asked for while there was no worker that could be told of it.

    Not an Exception: torch catches these on the way.
    """


class SignalPipe:
    """Keeps signals from killing or stopping this process, and says which ones came.

    The handler in C writes the number at once, also while the main thread is inside a long call of
    torch's. To be opened and closed in the main thread; :meth:`wait` belongs to one other.
    """

    def __init__(self, signals: Iterable[int], *, stops: Iterable[int] = ()) -> None:
        """``stops``: those that end an :meth:`interruptible` block."""
        self._signals = frozenset(signals)
        self._stops = frozenset(stops)
        self._interruptible = False
        self._before: dict[int, Any] = {}
        self._read_fd = self._write_fd = self._wakeup_before = -1

    def open(self) -> None:
        """Take the signals over; a second call takes back those that somebody else took since."""
        if self._read_fd < 0:
            self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signo in self._signals:
            before = signal.signal(signo, self._arrived)
            self._before.setdefault(signo, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)  # held until now: autoload.hold

    def close(self, *, to_exit: bool = False) -> None:
        """Put back what was there before, and end :meth:`wait`.

        Args:
            to_exit: ignore the signals instead. Slurm sends SIGTERM twice, and srun one more when
                the first task has left with a status: a process that is on its way out with its
                own status would die of it.
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
        """The signals that came, in their order; empty after ``timeout_s``, None after
        :meth:`close`."""
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
        """A stop that arrives meanwhile ends the block.

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
