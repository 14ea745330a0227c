"""Stop the processes that multiprocessing made for a rank while the rank is parked.

They get SIGSTOP once the rank is parked and SIGCONT when it runs again, with everything below them.
Not earlier: on its way to a collective a rank may need what they produce. Two kinds are left alone:

- DataLoader workers: their queues fill up and they wait; a stopped one would let the time-out of
  its loader expire;
- children that called ``hydroslurm.install()``: they are ranks, and park by themselves.

If the rank is killed meanwhile, a shell at the other end of a pipe continues them. What was tried
instead, PR_SET_PDEATHSIG in each child, reaches neither grandchildren nor the children of a
forkserver, and fires whenever the thread ends that started the child.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from hydroslurm.core import registry
from hydroslurm.core.proc import PARENT, STATE, children_of, stat_of
from hydroslurm.runtime.child_signals import is_loader_worker

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
        if is_loader_worker(process):
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
