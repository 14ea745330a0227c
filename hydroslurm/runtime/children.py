"""The processes below a rank: its signals do not kill them, and they stop while it is parked.

Under proctrack/linuxproc, and with ``scancel --full``, every process of a job step receives the
signal that is meant for the rank.

**Started with exec** (multiprocessing's spawn and forkserver, ``subprocess``): exec resets handlers
to the default, of which USR1 kills. So the thread that starts the child blocks the signals: the
mask is inherited through exec without a gap, and a signal for the rank reaches another thread or
waits for those milliseconds. A program that is not Python keeps them blocked. A Python with
hydroslurm ignores them from its start on (:mod:`hydroslurm.runtime.autoload`), and gets them where
the script installs a handler. ``os.system`` uses none of the functions wrapped here.

**Forked**: inherits our handlers, which see that nothing is meant for it.

**DataLoader workers** must also survive the stop signals, and still end with the rank: of SIGTERM
torch's handler lets them die, and the rank's main thread then raises, perhaps in the middle of the
save. So the signals are blocked while workers are made, and :class:`WorkerGuard` takes them there.

What remains: a worker that hangs in C code with the GIL held ends by SIGKILL only; programs that a
worker starts (``subprocess``) inherit the blocked mask: end them with ``kill()``; and a forkserver
that was started before, outside, dies of the signals (tried), and its workers with it.

**While the rank is parked** the processes that multiprocessing made for it are stopped, with all
that is below them: SIGSTOP once it is parked, SIGCONT when it runs again. Not earlier: on its way
to a collective a rank may need what they produce. Two kinds are left alone:

- DataLoader workers: their queues fill up and they wait; a stopped one would let the time-out of
  its loader expire;
- children that called ``hydroslurm.install()``: they are ranks, and park by themselves.

If the rank is killed meanwhile, a shell at the other end of a pipe continues them. What was tried
instead, PR_SET_PDEATHSIG in each child, reaches neither grandchildren nor the children of a
forkserver, and fires whenever the thread ends that started the child.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hydroslurm.core import registry
from hydroslurm.core.proc import PARENT, STATE, children_of, stat_of
from hydroslurm.core.threads import thread
from hydroslurm.runtime.autoload import BELOW_ENV, PREEMPT_ENV, RankAbove

_CHECK_S = 5.0  # how often a worker checks that its rank is alive, as torch's watchdog does
_CHECK_AFTER_SIGNAL_S = 0.5  # once a signal came: a rank without a handler died of it
_WORKER_LOOP = "_worker_loop"  # in torch.utils.data, and in torchdata.stateful_dataloader
_loader_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


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
    undo = _wrap(multiprocessing.util, "spawnv_passfds", _blocking(signals))
    try:
        with _blocked(signals):
            yield
    finally:
        undo()


@contextlib.contextmanager
def spawns_shielded(signals: Collection[int], *, killing: Collection[int] = ()) -> Iterator[None]:
    """Start other programs with some signals blocked.

    Args:
        signals: for children that multiprocessing makes.
        killing: for other programs, which Ctrl-Z is to stop.
    """
    pid, before = os.getpid(), os.environ.get(BELOW_ENV)
    us = RankAbove(pid, registry.start_ticks(pid) or 0, frozenset(killing))
    has_added_preempt = PREEMPT_ENV not in os.environ
    # a Python that starts looks for this variable alone; empty, it asks for nothing
    os.environ.setdefault(PREEMPT_ENV, "")
    os.environ[BELOW_ENV] = us.as_text()
    undo_spawns = _wrap(multiprocessing.util, "spawnv_passfds", _blocking(signals))
    undo_programs = _wrap(subprocess.Popen, "_execute_child", _blocking(killing))
    try:
        yield
    finally:
        undo_programs()
        undo_spawns()
        os.environ.pop(BELOW_ENV, None)
        if before is not None:
            os.environ[BELOW_ENV] = before
        if has_added_preempt and not os.environ.get(PREEMPT_ENV):
            os.environ.pop(PREEMPT_ENV, None)


@contextlib.contextmanager
def workers_shielded(signals: Collection[int]) -> Iterator[None]:
    """Start this process's DataLoader workers so that they survive some signals.

    Workers of all DataLoaders, torch's and torchdata's, are processes of multiprocessing's with a
    target of one name, and all are started by one method, which is the one place to wrap.
    """

    def start(original: Callable[[Any], None], process: Any) -> None:
        target: Any = getattr(process, "_target", None)
        if not signals or getattr(target, "__name__", "") != _WORKER_LOOP:
            original(process)
            return
        process._target = WorkerGuard(signals, then=target)
        _loader_workers.add(process)
        with shielded(signals):
            original(process)

    def spawn(original: Callable[..., int], path: Any, args: Any, passfds: Any) -> int:
        # a loader's first queue starts the resource tracker, before there is any worker
        is_tracker = any("resource_tracker" in os.fsdecode(word) for word in args)
        with _blocked(signals if is_tracker else ()):
            return original(path, args, passfds)

    undo_start = _wrap(BaseProcess, "start", start)
    undo_spawn = _wrap(multiprocessing.util, "spawnv_passfds", spawn)
    try:
        yield
    finally:
        undo_spawn()
        undo_start()


@contextlib.contextmanager
def wandb_shielded(signals: Collection[int]) -> Iterator[None]:
    """Start ``wandb-core`` where these signals do not end it: see :mod:`wandb_keeper`."""

    def start(original: Callable[..., Any], popen: Any, argv: Any, *rest: Any) -> Any:
        if not _is_wandb(argv):
            return original(popen, argv, *rest)
        with _blocked(signals):
            return original(popen, [sys.executable, "-I", "-S", _KEEPER, *argv], *rest)

    undo = _wrap(subprocess.Popen, "_execute_child", start)
    try:
        yield
    finally:
        undo()


_KEEPER = str(Path(__file__).with_name("wandb_keeper.py"))


def _is_wandb(argv: Any) -> bool:
    is_list = isinstance(argv, (list, tuple)) and "--pid" in argv
    return is_list and Path(os.fsdecode(argv[0])).name == "wandb-core"


class WorkerGuard:
    """A worker's target: the worker's own loop, behind a thread that drops the signals and ends the
    worker on SIGTERM from its parent, or once that is gone.

    Without it workers whose signals are blocked would be immortal: at exit multiprocessing sends
    SIGTERM to its children and waits for them forever, and torch's watchdog looks at ``getppid()``,
    which under forkserver is the server's, which waits for them too.

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


def _blocking(signals: Collection[int]) -> Callable[..., Any]:
    """For :func:`_wrap`: calls the original with the signals blocked."""

    def start(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _blocked(signals):
            return original(*args, **kwargs)

    return start


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Have each call of a function go through ``around(original, *arguments)``; returns what puts
    the original back, or lets calls pass if somebody has wrapped it again since."""
    original, is_on = getattr(owner, name), True

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if is_on else original(*args, **kwargs)

    def undo() -> None:
        nonlocal is_on
        is_on = False
        if getattr(owner, name) is call:
            setattr(owner, name, original)

    setattr(owner, name, call)
    return undo


# --- while the rank is parked
# ------------------------------------------------------------------------------------------------

_CONTINUE = 'while read -r pid; do pids="$pids $pid"; done; kill -CONT $pids'
"""Read process ids, one a line, and continue those processes once the pipe's writers are gone."""

_pipes: set[int] = set()


def _close_pipes() -> None:
    """A forked child that kept one would keep the shell from noticing that its rank is gone."""
    while _pipes:
        os.close(_pipes.pop())


os.register_at_fork(after_in_child=_close_pipes)


class Children:
    """The processes below this one that multiprocessing made. For one thread."""

    def __init__(self, ranks: Path | None) -> None:
        """``ranks``: the folder where ranks announce themselves, None if there is none."""
        self._ranks = ranks
        self._is_paused = False
        self._stopped: set[int] = set()
        self._shell: tuple[int, int] | None = None  # pid, pipe

    def stop(self) -> int:
        """Stop them; returns how many are stopped."""
        self._is_paused = True
        self.stop_again()
        return len(self._stopped)

    def stop_again(self) -> None:
        """During a pause: stop children that were started or continued since. ``scontrol resume``
        continues them while another cause still holds the rank."""
        if not self._is_paused:
            return
        for pid in _started_here():
            self._stop(pid)

    def resume(self) -> None:
        """The rank runs again: so do they."""
        self._is_paused = False
        for pid in self._stopped:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()
        self._end_shell()

    def _stop(self, pid: int) -> None:
        """First the process, so that it starts no others, then what is below it."""
        if self._ranks is not None and registry.find(self._ranks, pid) is not None:
            return
        try:
            if pid not in self._stopped:
                self._tell_shell(pid)
                self._stopped.add(pid)
            os.kill(pid, signal.SIGSTOP)
        except OSError:  # it has ended; or nobody would continue it
            return
        for child in children_of(pid):
            self._stop(child)

    def _tell_shell(self, pid: int) -> None:
        if self._shell is None:
            self._shell = _start_shell()
        os.write(self._shell[1], b"%d\n" % pid)

    def _end_shell(self) -> None:
        if self._shell is None:
            return
        pid, pipe = self._shell
        self._shell = None
        _pipes.discard(pipe)
        os.close(pipe)
        with contextlib.suppress(OSError):  # the script may wait for all its children
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _start_shell() -> tuple[int, int]:
    """Raises OSError."""
    reads, writes = os.pipe()
    _pipes.add(writes)
    nowhere = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
    try:
        pid = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", _CONTINUE],
            {},
            file_actions=[(os.POSIX_SPAWN_DUP2, reads, 0), *nowhere],
            setsigmask=signal.valid_signals(),  # nor does it die of what is sent to a job step
        )
    except OSError:
        _pipes.discard(writes)
        os.close(writes)
        raise
    finally:
        os.close(reads)
    return pid, writes


def _started_here() -> Iterator[int]:
    """The living processes that this one made with multiprocessing, also through a forkserver."""
    here = os.getpid()
    for process in tuple(multiprocessing.process._children):  # type: ignore[attr-defined]
        if process in _loader_workers:
            continue
        with contextlib.suppress(ValueError, OSError):
            pid = process.pid
            # of one that ended through a forkserver, the number may be another process's by now
            if here in (parent := _parent_of(pid), _parent_of(parent)):
                yield pid


def _parent_of(pid: int) -> int:
    """Raises OSError, also for a process that has ended."""
    stat = stat_of(pid)
    if stat[STATE] == "Z":
        raise ProcessLookupError(pid)
    return int(stat[PARENT])
