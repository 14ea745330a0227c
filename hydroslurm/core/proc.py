"""Processes: reading /proc; prctl(2), for a process's orphans and its death with its parent; and
the command lines of our own children."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

STATE, PARENT, START_TICKS = 0, 1, 19
"""Places in what :func:`stat_of` returns; the last is in clock ticks since boot."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def stat_of(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the third on: the name in the second may hold anything, so
    that only its last parenthesis tells where it ends.

    Raises:
        OSError: there is no such process.
    """
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


def environ_of(pid: int | str) -> dict[str, str]:
    """The environment that a process was started with; empty for one that has cleared it.

    Raises:
        OSError: there is no such process, or it is another user's.
    """
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(variable).partition("=") for variable in variables)
    return {name: value for name, equals, value in pairs if equals}


@functools.cache
def boot_id() -> str:
    """The boot of this host, within which CLOCK_MONOTONIC is one clock for all processes; empty
    where there is no /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pids() -> list[int]:
    """The ids of all processes, of all users."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - faster


def status_of(pid: int | str) -> dict[str, str]:
    """Name -> value of each line of /proc/PID/status; raises as :func:`stat_of`."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def children_of(pid: int) -> Iterator[int]:
    """Those of all its threads; none of a process that has ended."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, file.read_text().split())


def catches(pid: int, signo: int) -> bool:
    """Whether the process has a handler for the signal; raises as :func:`stat_of`."""
    return bool(int(status_of(pid)["SigCgt"], 16) >> (signo - 1) & 1)


def adopt_orphans() -> None:
    """Make this process, and the program that it becomes by exec, the parent of every orphan among
    its descendants.

    slurmd's job steps and daemons of all kinds detach themselves twice; so they can still be found.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, a thread of
    ``parent``. For ``preexec_fn``."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


# `-I` would also hide what PYTHONPATH and `pip install --user` have
_PROGRAM = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); from runpy import run_module; "
    "run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""What ``-P -m`` does, which is Python 3.11's."""


def module_command(
    python: str, module: str, *arguments: str, unbuffered: bool = False
) -> list[str]:
    """As ``python -m module``, which would import from the working directory first: an ``nt.py`` or
    a ``queue.py`` of the user's would end the process."""
    knows_it = python == sys.executable and sys.version_info >= (3, 11)
    how = ["-P"] if knows_it else []
    how += ["-u"] if unbuffered else []
    how += ["-m"] if knows_it else ["-c", _PROGRAM]
    return [python, *how, module, *arguments]


def _prctl(option: int, value: int) -> None:
    import ctypes  # no rank's start waits for it

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
