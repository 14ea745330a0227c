"""What /proc tells of processes below this one. A process that is gone has and does nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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


def exit_codes(pcontext: Any) -> dict[int, int | None]:
    """How the worker of each local rank has ended, negative for a signal; None: it lives. Takes
    nothing away from torch, which waits for them too.

    Args:
        pcontext: torch's, of the workers of this node.
    """
    return {rank: _exit_code(pcontext, rank, pid) for rank, pid in pcontext.pids().items()}


def _exit_code(pcontext: Any, local_rank: int, pid: int) -> int | None:
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # torch was first
        handler = getattr(pcontext, "subprocess_handlers", {}).get(local_rank)
        return 0 if handler is None else handler.proc.returncode
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
