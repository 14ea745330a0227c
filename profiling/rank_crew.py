"""The program of the forked ranks that ranks.py measures (tests/forkedranks.py starts them).

Options: ``what`` is ``train`` or ``cost``, ``folder`` of the attempt. ``train`` trains with
DistributedDataParallel in a Run until it is stopped, with a state of ``state_bytes`` and a step of
some milliseconds all the same; ``cost`` is rank_cost.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rank_cost
import steps
import torch
import torch.distributed as dist
from forkedranks import serve
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hydroslurm

BATCH = 8
LENGTH = 32
WIDTH = 16
FIRST_DATA_SEED = 1


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


def be_rank(options: dict[str, Any], rank: int) -> None:
    """One rank of this attempt, from its process group to its end."""
    folder = Path(options["folder"])
    dist.init_process_group(
        "gloo", init_method=f"file://{options['meet']}", rank=rank, world_size=options["world"]
    )
    if options["what"] == "cost":
        rank_cost.measure(folder, rounds=options["rounds"], steps_per_block=options["steps"])
    else:
        train(folder / "run", state_bytes=options["state_bytes"])


if __name__ == "__main__":
    serve(be_rank)
