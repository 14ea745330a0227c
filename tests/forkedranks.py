"""Ranks that are forked from a process which has torch loaded: 4 s of processor time less for each.

A program calls :func:`serve`; it then reads one attempt per line of JSON on stdin: ``world``, how
many ranks, ``meet``, a new file for their process group, and optionally ``environ``. ``rank N pid
P`` comes back for each rank, what they print, ``rank N ended CODE`` for each, and ``all ended``.
The other side of the pipe talks to it with :func:`start` and :func:`wait_for_end`.

The tests of several ranks and profiling/ranks.py use it.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from processes import Child

PR_SET_PDEATHSIG = 1


def serve(be_rank: Callable[[dict[str, Any], int], None]) -> None:
    """Fork the ranks of one attempt after the other, until stdin ends.

    Args:
        be_rank: what a rank does, given the line and its number. Its exit status is 0, that of a
            SystemExit, or 1 with the traceback printed.
    """
    import torch

    import hydroslurm.training.run  # noqa: F401 - loaded before the fork

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="hydroslurm")  # what they say is in the output
    # unbuffered, each print is two writes, and what another rank says comes in between
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True, write_through=False)
    die_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.optim.Adam([torch.ones(1)])  # imports most of what torch has
    print("ready", flush=True)
    for line in sys.stdin:
        _attempt(json.loads(line), be_rank)


def start(program: Child, world: int, **options: Any) -> dict[int, int]:
    """Have the ranks of an attempt forked; their process ids, by rank."""
    program.say(json.dumps({"world": world, **options}))
    return {rank: int(program.expect(f"rank {rank} pid")) for rank in range(world)}


def wait_for_end(program: Child, world: int) -> dict[int, int]:
    """The exit statuses of all ranks of the attempt, by rank; minus the signal for a killed one."""
    codes: dict[int, int] = {}
    while len(codes) < world:
        number, _, rest = program.expect("rank ").partition(" ")
        if rest.startswith("ended"):
            codes[int(number)] = int(rest.split()[1])
    program.expect("all ended")
    return codes


def die_with_parent() -> None:
    """Whoever started this process may be killed; ranks would then train for ever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _attempt(options: dict[str, Any], be_rank: Callable[[dict[str, Any], int], None]) -> None:
    import hydroslurm

    pids = {}
    for rank in range(options["world"]):
        pid = os.fork()
        if pid == 0:
            code = _status(options, rank, be_rank)
            sys.stdout.flush()
            if hydroslurm.is_installed():
                hydroslurm.uninstall()
            os._exit(code)  # not by way of torch, which may hang at exit
        pids[pid] = rank
        print(f"rank {rank} pid {pid}", flush=True)
    while pids:
        pid, status = os.wait()
        if pid in pids:
            print(f"rank {pids.pop(pid)} ended {os.waitstatus_to_exitcode(status)}", flush=True)
    print("all ended", flush=True)


def _status(
    options: dict[str, Any], rank: int, be_rank: Callable[[dict[str, Any], int], None]
) -> int:
    die_with_parent()
    world = str(options["world"])
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=world,
        LOCAL_WORLD_SIZE=world,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        TORCHELASTIC_RUN_ID=options["meet"],
        **options.get("environ", {}),
    )
    try:
        be_rank(options, rank)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
