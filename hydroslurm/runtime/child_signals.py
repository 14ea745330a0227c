"""Keep the rank's signals from killing the processes that it starts.

Under proctrack/linuxproc, and with ``scancel --full``, every process of a job step receives the
signal that is meant for the rank.

**Started with exec** (multiprocessing's spawn and forkserver, ``subprocess``): exec resets handlers
to the default, so one ``scancel --signal=USR1`` would kill all of them. What was weighed:

- handlers in the child come too late: it takes a while from exec to our first line, and programs
  that are not Python have none;
- ignoring the signals in the parent during the start would lose a pause that arrives just then;
- ignoring them between fork and exec needs a fork, which ``subprocess`` avoids for good reason
  (vfork: 1 ms; fork: 100 ms where the rank holds 2 GiB);
- **blocking** them in the thread that starts the child: a blocked mask is inherited through exec,
  there is no gap, and the signal reaches another thread of the parent or waits for those
  milliseconds.

A program that is not Python keeps them blocked: it does not die of one unless it empties its mask
itself (dash does, waiting for the first of several commands), and has to unblock one that it wants.
A Python with hydroslurm ignores them from its start on (:mod:`hydroslurm.runtime.autoload`) and
gets them again where the script installs a handler. ``os.system`` uses none of the functions
wrapped here.

**Forked**: inherits our handlers, which see that nothing is meant for it.

**DataLoader workers** must also survive the stop signals, and still end with the rank. torch's C
handler lets a worker die of SIGTERM; torch then raises ``DataLoader worker is killed by signal`` in
the rank's main thread, perhaps in the middle of the save. Two things are needed, because each alone
fails:

- the signals are blocked while workers are made, so there is no gap in the seconds that a spawned
  worker takes to import torch;
- blocking alone would make workers immortal: at exit multiprocessing sends SIGTERM to its
  children and then waits for them forever (tried: it hangs whenever an iterator is still alive
  at exit). torch's own handler tells the parent's SIGTERM from anybody else's by ``si_pid``; so
  a thread in the worker takes the blocked signals with ``sigtimedwait`` and does the same:
  one from the parent ends the worker, others are dropped.

That thread also ends the worker when the rank is gone. torch's own watchdog looks at
``getppid()``, which under forkserver is the server's; and the server waits for the workers
(measured: after a SIGKILL to the rank all of them stay forever).

What remains: a worker that hangs in C code with the GIL held ends by SIGKILL only; programs that a
worker starts (``subprocess``) inherit the blocked mask: end them with ``kill()``; and a forkserver
that was started before, outside, dies of the signals (tried), and its workers with it.

Children other than these workers are stopped while the rank is parked:
:mod:`hydroslurm.runtime.children`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import subprocess
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from hydroslurm.core import registry
from hydroslurm.core.threads import thread
from hydroslurm.runtime.autoload import BELOW_ENV, PREEMPT_ENV, RankAbove

_CHECK_S = 5.0  # how often a worker checks that its rank is alive, as torch's watchdog does
_CHECK_AFTER_SIGNAL_S = 0.5  # once a signal came: a rank without a handler died of it
_WORKER_LOOP = "_worker_loop"  # in torch.utils.data, and in torchdata.stateful_dataloader
_loader_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


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

    A signal that arrives meanwhile reaches another thread, or waits until the block ends. Children
    made so do not hear ``terminate()`` unless they unblock SIGTERM or take it as
    :class:`WorkerGuard` does.
    """
    if not signals:
        yield
        return
    # multiprocessing's resource tracker, which the first spawn starts, leaves SIGTERM and SIGINT
    # *unblocked* behind it, whatever they were: so they are blocked again around each spawn
    original = multiprocessing.util.spawnv_passfds
    wrapper = _blocking(original, signals)
    multiprocessing.util.spawnv_passfds = wrapper
    try:
        with _blocked(signals):
            yield
    finally:
        if multiprocessing.util.spawnv_passfds is wrapper:
            multiprocessing.util.spawnv_passfds = original


def is_loader_worker(process: BaseProcess) -> bool:
    """Whether it is a DataLoader worker that was started under a :class:`WorkerShield`."""
    return process in _loader_workers


class SpawnShield:
    """Starts other programs with some signals blocked. One at a time per process."""

    def __init__(self, signals: Iterable[int], *, killing: Iterable[int] = ()) -> None:
        """
        Args:
            signals: for children that multiprocessing makes.
            killing: for other programs, which Ctrl-Z is to stop.
        """
        places = (
            (multiprocessing.util, "spawnv_passfds", frozenset(signals)),
            (subprocess.Popen, "_execute_child", frozenset(killing)),
        )
        self._places = [place for place in places if place[2]]
        self._wrapped: list[tuple[Any, str, Any, Any]] = []
        self._killing = frozenset(killing)
        self._above_before: str | None = None
        self._has_added_preempt = False

    def install(self) -> None:
        pid = os.getpid()
        self._above_before = os.environ.get(BELOW_ENV)
        us = RankAbove(pid, registry.start_ticks(pid) or 0, self._killing)
        os.environ[BELOW_ENV] = us.as_text()
        self._has_added_preempt = PREEMPT_ENV not in os.environ
        # a Python that starts looks for this variable alone; empty, it asks for nothing
        os.environ.setdefault(PREEMPT_ENV, "")
        for owner, name, signals in self._places:
            original = getattr(owner, name)
            wrapper = _blocking(original, signals)
            setattr(owner, name, wrapper)
            self._wrapped.append((owner, name, original, wrapper))

    def uninstall(self) -> None:
        """Put the originals back, unless somebody has wrapped them again since."""
        os.environ.pop(BELOW_ENV, None)
        if self._has_added_preempt and not os.environ.get(PREEMPT_ENV):
            os.environ.pop(PREEMPT_ENV, None)
        if self._above_before is not None:
            os.environ[BELOW_ENV] = self._above_before
        for owner, name, original, wrapper in self._wrapped:
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)
        self._wrapped.clear()


class WorkerShield:
    """Starts this process's DataLoader workers so that they survive some signals.

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
            _loader_workers.add(process)
            with shielded(self._signals):
                original(process)

        self._original, self._wrapper = original, start
        BaseProcess.start = start  # type: ignore[method-assign, assignment]

    def uninstall(self) -> None:
        """Put the original back; if somebody has wrapped it again since, pass calls through."""
        if self._original is not None and BaseProcess.start is self._wrapper:
            BaseProcess.start = self._original  # type: ignore[method-assign, assignment]
        self._original = self._wrapper = None


class WorkerGuard:
    """A worker's target: the worker's own loop, behind a thread that drops the signals and ends the
    worker on SIGTERM from its parent, or once that is gone.

    Can be pickled when ``then``, the worker's own loop, can.
    """

    def __init__(self, signals: Collection[int], *, then: Callable[..., Any]) -> None:
        self.signals = frozenset(signals)
        self.then = then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # sigtimedwait wants them blocked, whoever started this worker
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        thread(self._watch, name="hydroslurm-signals").start()
        return self.then(*args, **kwargs)

    def _watch(self) -> None:
        parent, check_s = multiprocessing.parent_process(), _CHECK_S
        while parent is not None and parent.is_alive():
            seen = signal.sigtimedwait(self.signals, check_s)
            if seen and seen.si_signo == signal.SIGTERM and seen.si_pid == parent.pid:
                break
            if seen:
                check_s = _CHECK_AFTER_SIGNAL_S
        os._exit(0)  # as torch's handler does


@contextlib.contextmanager
def _blocked(signals: Collection[int]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _blocking(original: Callable[..., Any], signals: Collection[int]) -> Callable[..., Any]:
    def start(*args: Any, **kwargs: Any) -> Any:
        with _blocked(signals):
            return original(*args, **kwargs)

    return start
