"""What /proc tells of processes below this one. A process that is gone has and does nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def family(pid: int) -> Iterator[int]:
    """The process and everything that descends from it, parents first."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def catches(pid: int, signo: int) -> bool:
    """Whether the process has a handler for the signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return any(int(mask, 16) >> (signo - 1) & 1 for mask in masks)


def send(pid: int, signo: int) -> bool:
    """Signal one process; False when it is gone."""
    try:
        os.kill(pid, signo)
    except ProcessLookupError:
        return False
    return True


def send_group(pid: int, signo: int) -> None:
    """Signal the process and, where it leads a group of its own as torchrun's workers do, all of
    that."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signo)
        else:
            os.kill(pid, signo)
