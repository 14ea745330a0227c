"""Processes as /proc shows them: who is alive, who descends from whom, who belongs to a cluster."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

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
        return None if stat is None else cls(pid, stat.start_ticks)

    @property
    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def send(self, signo: int) -> None:
        """Signal it; nothing when it is gone."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signo)


@dataclass(frozen=True)
class _Stat:
    parent: int
    start_ticks: int


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
    for other in _all_pids():
        stat = _stat(other)
        if stat is not None:
            children.setdefault(stat.parent, []).append(other)
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def find(matches: Callable[[int], bool]) -> list[int]:
    """Every process but this one that matches."""
    return [pid for pid in _all_pids() if pid != os.getpid() and matches(pid)]


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


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - faster


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the name in brackets may hold anything, brackets and blanks included
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return _Stat(parent=int(fields[1]), start_ticks=int(fields[19]))


def environment(pid: int) -> dict[str, str]:
    """What a process of this user was started with; empty when it is gone or has emptied it."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition("=") for item in raw.decode(errors="replace").split("\0") if item)
    return {name: value for name, _, value in pairs}


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
