"""Keep stdout and stderr from failing during a stop.

The signal that stops a rank also ends the ``tee`` that reads its output, and the next ``print``
would raise BrokenPipeError before the state is saved. So once a stop is requested, output that
cannot be written is dropped.

The lowest Python object of each stream is guarded: print, logging, warnings and tqdm all end there,
even through a bound ``write`` that they hold. A broken pipe is replaced by ``/dev/null``, for C
code and ``os.write``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

COMING_S = 1.0
"""How long the first failed write waits for a stop: Slurm signals one process after the other, and
what reads the output may be gone before this process is signalled."""


class Output:
    """Guards the streams of this process between :meth:`guard` and :meth:`release`."""

    def __init__(
        self, stop_comes: Callable[[float], bool], on_lost: Callable[[str, OSError], None]
    ) -> None:
        """
        Args:
            stop_comes: whether a stop is requested within a number of seconds.
            on_lost: called once for each stream, before its first loss.
        """
        self._stop_comes = stop_comes
        self._on_lost = on_lost
        self._wait_s = COMING_S
        self._guarded: dict[tuple[int, str], Any] = {}
        self._lost: set[str] = set()
        self._pid = os.getpid()

    def guard(self) -> None:
        """Guard what ``sys.stdout`` and ``sys.stderr`` are now; may be called again."""
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            stream = getattr(sys, name)
            for inner in ("buffer", "raw"):
                stream = getattr(stream, inner, stream)
            for method in ("write", "flush"):
                if (id(stream), method) not in self._guarded and hasattr(stream, method):
                    with contextlib.suppress(AttributeError, TypeError):  # one with __slots__
                        setattr(stream, method, self._guard(stream, method, name.strip("_")))
                        self._guarded[id(stream), method] = stream
        if signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does by itself

    def release(self) -> None:
        """Let the streams raise again."""
        for (_, method), stream in self._guarded.items():
            with contextlib.suppress(AttributeError):
                delattr(stream, method)
        self._guarded.clear()

    def check(self) -> None:
        """After a stop was requested: find pipes without a reader."""
        poller = select.poll()
        poller.register(1, 0)
        poller.register(2, 0)
        for fd, event in poller.poll(0):
            if event & select.POLLERR:
                self._lose("stdout" if fd == 1 else "stderr", fd, BrokenPipeError("nobody reads"))

    def _guard(self, stream: Any, method: str, name: str) -> Callable[..., Any]:
        original = getattr(stream, method)

        def guarded(*arguments: Any) -> Any:
            try:
                return original(*arguments)
            except OSError as error:
                if not self._may_drop():
                    raise
                self._lose(name, stream, error)
                return len(arguments[0]) if arguments else None

        return guarded

    def _may_drop(self) -> bool:
        """A forked worker does not learn of the stop; its rank decides what a broken pipe means."""
        wait_s, self._wait_s = self._wait_s, 0.0
        return os.getpid() != self._pid or self._stop_comes(wait_s)

    def _lose(self, name: str, stream: Any, error: OSError) -> None:
        if name not in self._lost and os.getpid() == self._pid:
            self._lost.add(name)
            self._on_lost(name, error)
        if isinstance(error, BrokenPipeError):
            with contextlib.suppress(Exception):  # one without a descriptor
                fd = stream if isinstance(stream, int) else stream.fileno()
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, fd)
                os.close(null)
