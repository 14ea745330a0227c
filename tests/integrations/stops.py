"""Places of a training at which it gets a SIGTERM, whatever framework drives it.

A stop is ``PLACE:N``, the N-th time in an attempt, from 1, that it comes to that place, or
``PLACE:N@RANK``, there in this rank only. The places are ``step`` (an optimizer step is complete),
``forward`` (of a batch that is trained on, before it) and ``eval`` (of one that is not), and those
that a script itself names. ``PLACE:N...`` stands for such a stop in each attempt, until one comes
to its end.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hydroslurm.runtime import install

_counts: Counter[str] = Counter()
_stop = [""]


def arm(stop: str) -> None:
    """Have this process stopped there; with "" nowhere."""
    stop, _, rank = stop.partition("@")
    _stop[0] = stop if rank in ("", os.environ.get("RANK")) else ""
    _counts.clear()
    register_optimizer_step_post_hook(lambda *_: reach("step"))
    call, depth = torch.nn.Module.__call__, [0]

    def outermost(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        depth[0] += 1
        try:
            if depth[0] == 1:
                reach("forward" if torch.is_grad_enabled() else "eval")
            return call(module, *args, **kwargs)
        finally:
            depth[0] -= 1

    torch.nn.Module.__call__ = outermost  # type: ignore[method-assign]


def reach(place: str) -> None:
    """The training is here."""
    _counts[place] += 1
    if _stop[0] == f"{place}:{_counts[place]}":
        # Slurm signals all of a job step. Not we: a worker ends when its parent says so
        pids = map(str, (*_children(), os.getpid()))
        subprocess.run(["sh", "-c", f"kill -TERM {' '.join(pids)}"], check=True)
        while not install.controller().stop_request:
            time.sleep(0.001)


def _children() -> list[int]:
    """The workers of this process's loaders."""
    me = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return [int(pid) for pid in me.read_text().split()]
