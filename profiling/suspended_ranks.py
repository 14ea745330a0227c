"""The job of several ranks that long_suspend.py suspends.

    srun -n 4 suspended_ranks.py with|without ddp|fsdp FOLDER TIMEOUT_S

Trains until it is cancelled. ``without`` is torch alone. Each rank writes how far it is to
``FOLDER/rank-N``.
"""

from __future__ import annotations

import datetime
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from progress import Progress
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH = 64
LOADING_S = 0.04
"""Each step of each rank waits at most so long for its data: else the ranks of several jobs on a
few cores would wait for one another until their collectives' time-out."""

Step = Callable[[], None]


def training(how: str) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    if how == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.randn(8, WIDTH)

    def step() -> None:
        time.sleep(random.uniform(0, LOADING_S))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def train_alone(step: Step, progress: Progress) -> None:
    """As torch comes."""
    number = 0
    while True:
        step()
        number += 1
        progress.made(number)


def train_in_a_run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Step,
    *,
    progress: Progress,
    folder: Path,
) -> None:
    import hydroslurm

    run = hydroslurm.Run(
        model=model, optimizer=optimizer, directory=folder / "run", every_steps=0, every_s=0
    )
    run.resume()
    while True:
        step()
        run.step += 1
        run.safe_point()
        progress.made(run.step)


def meet(folder: Path, *, rank: int, size: int) -> None:
    """Wait until all ranks have imported torch: the time-out of the process group, which is short,
    is also that of its making."""
    (folder / f"ready-{rank}").touch()
    while not all((folder / f"ready-{other}").exists() for other in range(size)):
        time.sleep(0.05)


def main() -> None:
    way, how, folder, timeout_s = sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    meet(folder, rank=rank, size=size)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    model, optimizer, step = training(how)
    progress = Progress(folder / f"rank-{rank}", 0)
    if way == "with":
        train_in_a_run(model, optimizer, step, progress=progress, folder=folder)
    else:
        train_alone(step, progress)


if __name__ == "__main__":
    main()
