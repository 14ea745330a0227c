"""What Linux tells of a process in /proc."""

from __future__ import annotations

import os
from pathlib import Path

STATE, PARENT, START_TICKS = 0, 1, 19
"""Places in what :func:`stat_of` returns; the last is in clock ticks since boot."""


def stat_of(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the third on: the name in the second may hold anything, so
    that only its last parenthesis tells where it ends.

    Raises:
        OSError: there is no such process.
    """
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


def environ_of(pid: int | str) -> dict[str, str]:
    """What the program of a process was started with; empty for one that has emptied it.

    Raises:
        OSError: there is no such process, or it is another user's.
    """
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(variable).partition("=") for variable in variables)
    return {name: value for name, equals, value in pairs if equals}


def pids() -> list[int]:
    """All processes that there are, of all users."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - faster


def status_of(pid: int | str) -> dict[str, str]:
    """Name -> value of each line of /proc/PID/status; raises as :func:`stat_of`."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
