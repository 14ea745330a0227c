"""A program that has torch loaded and forks the ranks of small DDP trainings over gloo.

A line of JSON on stdin starts an attempt of all its ranks; ``ended CODES`` follows. Options:

folder: of the run: its state, and the process group's file.
attempt: a number; each attempt has its own.
world, first, last: ranks; the steps that this attempt makes.
settle: begin with the buckets of the attempt before.
ddp: options of DistributedDataParallel.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.checkpoint import rng
from hydroslurm.training.ddp_buckets import BucketOrders, is_settled


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 35),
        nn.BatchNorm1d(35),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(35, 27),
        nn.Tanh(),
        nn.Linear(27, 7),
    )


def train(rank: int, options: dict[str, Any]) -> None:
    folder = Path(options["folder"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group-{options['attempt']}",
        rank=rank,
        world_size=options["world"],
    )
    model = DistributedDataParallel(build(), **options.get("ddp", {}))
    orders = BucketOrders(lambda: [model], world_size=options["world"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    random.seed(rank)  # Python seeds it anew in every fork
    saved = folder / f"rank-{rank}.pt"
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        rng.restore(state["rng"])
        if options["settle"]:
            settle(model, orders, state["orders"])
    for step in range(options["first"], options["last"]):
        numbers = torch.Generator().manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(9, 20, generator=numbers)).square().mean().backward()
        optimizer.step()
        orders.state()
    state = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": rng.capture(),
        "orders": orders.state(),
    }
    torch.save(state, saved)
    (folder / f"hash-{rank}").write_text(hashlib.sha256(repr(state).encode()).hexdigest())
    dist.barrier()
    dist.destroy_process_group()


def settle(model: DistributedDataParallel, orders: BucketOrders, saved: list[Any]) -> None:
    """Buckets are final at once, and nothing else has changed."""
    before = str((model.module.state_dict(), rng.capture()))
    orders.load(saved)
    assert is_settled(model) is True
    assert str((model.module.state_dict(), rng.capture())) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def attempt(options: dict[str, Any]) -> list[int]:
    """Fork all ranks of one attempt; their exit codes."""
    pids = []
    for rank in range(options["world"]):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                train(rank, options)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def main() -> None:
    warnings.simplefilter("error")
    torch.set_printoptions(precision=17, threshold=10**9)
    torch.optim.Adam([torch.ones(1)])  # imports most of what torch has
    print("ready", flush=True)
    for line in sys.stdin:
        print("ended", attempt(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
