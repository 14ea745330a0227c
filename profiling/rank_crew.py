"""A program that has torch loaded and forks the ranks of one life at a time; ranks.py talks to it.

    rank_crew.py

A line of JSON on stdin is one life: ``{"what": "train"|"cost", "world": n, "folder": path, ...}``.
Each rank's ``rank N pid P`` comes back, ``rank N ended CODE`` and at last ``all ended``. ``train``
trains with DistributedDataParallel in a Run until it is stopped, with a state of ``state_bytes``
and a step of some milliseconds all the same; ``cost`` is rank_cost.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import rank_cost
import steps
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hydroslurm
import hydroslurm.training.run  # loaded before the fork

BATCH = 8
LENGTH = 32
WIDTH = 16
FIRST_DATA_SEED = 1
PR_SET_PDEATHSIG = 1


class Net(nn.Module):
    """A small transformer behind a table that is as large as asked for, and frozen: it is saved,
    and its gradients need not be summed."""

    def __init__(self, state_bytes: int) -> None:
        super().__init__()
        rows = max(1000, state_bytes // (4 * WIDTH))
        self.table = nn.Embedding(rows, WIDTH, _weight=torch.zeros(rows, WIDTH), _freeze=True)
        self.body = steps.transformer().model

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.table(rows))
        return out


def train(folder: Path, *, state_bytes: int) -> None:
    """Train until a stop."""
    torch.manual_seed(0)  # the same weights on all ranks
    model = DistributedDataParallel(Net(state_bytes))
    optimizer = torch.optim.Adam(
        parameter for parameter in model.parameters() if parameter.requires_grad
    )
    torch.manual_seed(FIRST_DATA_SEED + dist.get_rank())
    data = torch.randint(1000, (BATCH, LENGTH))
    hydroslurm.warm_up_ddp_buckets(model, data)
    run = hydroslurm.Run(
        model=model,
        optimizer=optimizer,
        directory=folder,
        every_steps=0,  # only what the stops save counts here
        every_s=0,
    )
    with run:
        run.resume()
        while True:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            run.step += 1
            run.safe_point()


def be_rank(order: dict[str, Any], rank: int) -> None:
    """One rank of this life, from its process group to its end."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(order["world"]),
        LOCAL_WORLD_SIZE=str(order["world"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        TORCHELASTIC_RUN_ID=order["folder"],
    )
    folder = Path(order["folder"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=order["world"]
    )
    if order["what"] == "cost":
        rank_cost.measure(folder, rounds=order["rounds"], steps_per_block=order["steps"])
    else:
        train(folder / "run", state_bytes=order["state_bytes"])


def live(order: dict[str, Any]) -> None:
    """Fork the ranks, and wait until all have ended."""
    os.environ["HYDROSLURM_STEP_KEY"] = secrets.token_hex(32)
    ranks = {}
    for rank in range(order["world"]):
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            os._exit(_status(order, rank))  # not by way of torch, which may hang at exit
        ranks[pid] = rank
        print(f"rank {rank} pid {pid}", flush=True)
    while ranks:
        pid, status = os.wait()
        if pid in ranks:
            print(f"rank {ranks.pop(pid)} ended {os.waitstatus_to_exitcode(status)}", flush=True)
    print("all ended", flush=True)


def die_with_parent() -> None:
    """Whoever started this process may be killed; ranks would then train for ever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _status(order: dict[str, Any], rank: int) -> int:
    try:
        be_rank(order, rank)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    warnings.simplefilter("error")
    die_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.optim.Adam([torch.ones(1)])  # imports most of what torch has
    print("ready", flush=True)
    for line in sys.stdin:
        live(json.loads(line))


if __name__ == "__main__":
    main()
