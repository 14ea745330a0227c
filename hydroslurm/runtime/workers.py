"""DataLoader workers that do not die of the rank's stop signals, and still end with the rank.

``install()`` puts a :class:`WorkerShield` in place, so that it holds for every DataLoader of the
process: of a ``Run``, of an evaluation, of a loop that uses HFAI's two calls.

Under proctrack/linuxproc, or with ``scancel --full``, every process of a job step gets the signal
that is meant for the rank. torch's C handler lets a worker die of SIGTERM; the rank then hears
SIGCHLD, and torch raises ``DataLoader worker is killed by signal`` in its main thread, perhaps in
the middle of the save.

Two things are needed, because each alone fails:

- the signals are **blocked** while workers are made. A blocked mask is inherited by fork and
  through exec, so there is no gap in the seconds that a spawned worker takes to import torch;
- blocking alone would make workers immortal: at exit multiprocessing sends SIGTERM to its
  children and then waits for them, for ever (tried: it hangs whenever an iterator is still alive
  at exit). torch's own handler tells the parent's SIGTERM from anybody else's by ``si_pid``; so
  a **thread in the worker** takes the blocked signals with ``sigtimedwait`` and does the same:
  from the parent it ends the worker, from others it is dropped.

The thread also ends the worker when the rank is gone. torch's own watchdog looks at ``getppid()``,
which under forkserver is the server's; and the server waits for the workers (measured: after a
SIGKILL to the rank all of them stay for ever).

What stays: a worker that hangs in C code with the GIL held ends by SIGKILL only; programs that a
worker starts (``subprocess``) inherit the blocked mask: end them with ``kill()``; and a forkserver
that was started before, outside, dies of the signals (tried), and its workers with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

_LOOK_S = 5.0  # how often a worker looks for its rank; as often as torch's watchdog does
_TOLD_LOOK_S = 0.5  # the same since a signal came, of which a rank without a handler is dead
_WORKER_LOOP = "_worker_loop"  # in torch.utils.data, and in torchdata.stateful_dataloader


def iterate(loader: Any, *, shield: Collection[int] = ()) -> Iterator[Any]:
    """Make an iterator whose workers survive the signals; they end with it and with this process.

    Works for DataLoader and its subclasses (torchdata's too), with fork, spawn and forkserver.
    For any other iterable the signals are blocked while its iterator is made, no more.
    """
    workers = WorkerShield(shield)
    with shielded(shield), contextlib.ExitStack() as undo:
        workers.install()
        undo.callback(workers.uninstall)
        return iter(loader)


@contextlib.contextmanager
def shielded(signals: Collection[int]) -> Iterator[None]:
    """Block signals in the calling thread; processes that are made inside keep them blocked.

    A signal that comes meanwhile reaches another thread, or waits until the block ends. Children
    made so do not hear ``terminate()`` unless they unblock SIGTERM or take it as
    :class:`WorkerGuard` does.
    """
    if not signals:
        yield
        return
    with _spawning_with_blocked(signals):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _spawning_with_blocked(signals: Collection[int]) -> Iterator[None]:
    """Block the signals again around each spawn. multiprocessing's resource tracker, which the
    first spawn starts, leaves SIGTERM and SIGINT *unblocked* behind it, whatever they were."""
    original = multiprocessing.util.spawnv_passfds

    def spawnv_passfds(*args: Any, **kwargs: Any) -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            return original(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    multiprocessing.util.spawnv_passfds = spawnv_passfds
    try:
        yield
    finally:
        if multiprocessing.util.spawnv_passfds is spawnv_passfds:
            multiprocessing.util.spawnv_passfds = original


class WorkerShield:
    """Makes this process start its DataLoader workers so that they survive some signals.

    Workers of all DataLoaders, torch's and torchdata's, are processes of multiprocessing's with a
    target of one name, and all are started by one method, which is the one place to wrap.
    """

    def __init__(self, signals: Collection[int]) -> None:
        self._signals = frozenset(signals)
        self._original: Callable[[Any], None] | None = None
        self._wrapper: Callable[[Any], None] | None = None

    def install(self) -> None:
        if not self._signals:
            return
        original = BaseProcess.start

        def start(process: BaseProcess) -> None:
            target = getattr(process, "_target", None)
            if self._wrapper is None or getattr(target, "__name__", "") != _WORKER_LOOP:
                original(process)
                return
            guard = WorkerGuard(self._signals, then=target)  # type: ignore[arg-type]
            process._target = guard  # type: ignore[attr-defined]
            with shielded(self._signals):
                original(process)

        self._original, self._wrapper = original, start
        BaseProcess.start = start  # type: ignore[method-assign, assignment]

    def uninstall(self) -> None:
        """Put the original back; where somebody has wrapped it again since, do nothing any more."""
        if self._original is not None and BaseProcess.start is self._wrapper:
            BaseProcess.start = self._original  # type: ignore[method-assign, assignment]
        self._original = self._wrapper = None


class WorkerGuard:
    """What a worker runs, behind a thread that drops the signals, and ends the worker on SIGTERM
    from its parent and when that is gone.

    Can be pickled when ``then``, the worker's own loop, can.
    """

    def __init__(self, signals: Collection[int], *, then: Callable[..., Any]) -> None:
        self.signals = frozenset(signals)
        self.then = then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # sigtimedwait wants them blocked, whoever started this worker
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        threading.Thread(target=self._take, name="hydroslurm-signals", daemon=True).start()
        return self.then(*args, **kwargs)

    def _take(self) -> None:
        parent, look_s = multiprocessing.parent_process(), _LOOK_S
        while parent is not None and parent.is_alive():
            seen = signal.sigtimedwait(self.signals, look_s)
            if seen and seen.si_signo == signal.SIGTERM and seen.si_pid == parent.pid:
                break
            if seen:
                look_s = _TOLD_LOOK_S
        os._exit(0)  # as torch's handler does
