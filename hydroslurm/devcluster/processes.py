"""The processes of a cluster: as /proc shows them, and the daemons that the supervisor starts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.core.proc import PARENT, START_TICKS, STATE, environ_of, pids, stat_of
from hydroslurm.devcluster.layout import Layout
from hydroslurm.errors import ClusterError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ProcessId:
    """One process and no later one that got its number.

    Attributes:
        start_ticks: when it started, clock ticks since boot.
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this number now; None when there is none, or only a zombie."""
        stat = _stat(pid)
        return None if stat is None else cls(pid, int(stat[START_TICKS]))

    @property
    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def send(self, signo: int) -> None:
        """Signal it; nothing when it is gone."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signo)


def become_subreaper() -> None:
    """Make this process the parent of every orphan among its descendants.

    slurmd's job steps and their children detach themselves twice; so they still end up here, where
    they can be found and ended.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent thread ends. For ``preexec_fn``."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``, zombies left out."""
    children: dict[int, list[int]] = {}
    for other in pids():
        stat = _stat(other)
        if stat is not None:
            children.setdefault(int(stat[PARENT]), []).append(other)
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def find(matches: Callable[[int], bool]) -> list[int]:
    """Every process but this one that matches."""
    return [pid for pid in pids() if pid != os.getpid() and matches(pid)]


def holds_file_below(pid: int, folder: Path) -> bool:
    """Whether a process of this user has a file open in a folder, by its real name, or below."""
    try:
        opened = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for descriptor in opened:
        with contextlib.suppress(OSError):
            if descriptor.readlink().is_relative_to(folder):
                return True
    return False


def end(processes: Iterable[ProcessId], *, limit_s: float = 10.0) -> None:
    """Kill processes and wait until they are gone, or until ``limit_s`` has passed."""
    waiting = list(processes)
    for process in waiting:
        process.send(signal.SIGKILL)
    deadline = time.monotonic() + limit_s
    while any(process.alive for process in waiting) and time.monotonic() < deadline:
        time.sleep(0.01)


def command_name(pid: int) -> str:
    """The process's short name; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """None when it is gone, or only a zombie."""
    try:
        stat = stat_of(pid)
    except OSError:
        return None
    return None if stat[STATE] in "ZX" else stat


def environment(pid: int) -> dict[str, str]:
    """What a process of this user was started with; empty when it is gone or has emptied it."""
    try:
        return environ_of(pid)
    except OSError:
        return {}


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


_TAIL_LINES = 12


@dataclass(frozen=True)
class Daemon:
    """A daemon in the foreground, as a child of the supervisor.

    Attributes:
        log: all that it says, quoted when it dies.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def id(self) -> ProcessId | None:
        return ProcessId.of(self.process.pid)

    def check(self) -> None:
        """Make sure that it runs.

        Raises:
            ClusterError: it has ended; the message has its own last log lines.
        """
        status = self.process.poll()
        if status is not None:
            raise ClusterError(
                f"{self.name} ended while the cluster was starting, {_ending(status)}. "
                f"{self.tail_text()}"
            )

    def tail_text(self) -> str:
        """Its last log lines, with their origin."""
        lines = "".join(f"\n  {line}" for line in tail(self.log))
        return f"The last lines of {self.log}:{lines or ' (it is empty)'}"


def start_daemon(
    name: str,
    argv: Sequence[str],
    *,
    layout: Layout,
    environ: Mapping[str, str],
    own_log: bool = False,
) -> Daemon:
    """Start a daemon that stays in the foreground.

    It dies with the supervisor, however that ends. Call it from the supervisor's main thread only:
    the kernel ties a child's life to the thread that forked it.

    Args:
        own_log: it writes its log file itself; stdout and stderr go beside it.
    """
    log = layout.console(name) if own_log else layout.log(name)
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=layout.root,
            env=dict(environ),
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
    return Daemon(name, process, log)


def reap(daemons: Sequence[Daemon]) -> None:
    """Collect every child that has ended, the orphans that this process inherited included."""
    known = {daemon.process.pid: daemon for daemon in daemons}
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        if ended.si_pid in known:
            known[ended.si_pid].process.poll()
        else:
            os.waitpid(ended.si_pid, os.WNOHANG)


def tail(log: Path) -> list[str]:
    """The last lines of a log file, none when it cannot be read."""
    try:
        with log.open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, _TAIL_LINES)]
    except OSError:
        return []


def _ending(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"by signal {-status}"
