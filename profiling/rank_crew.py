"""The program of the forked ranks that ranks.py measures (tests/forkedranks.py starts them).

Options: ``what`` is ``train`` or ``cost``, ``folder`` of the attempt. ``train`` trains with
DistributedDataParallel in a Run until it is stopped, with a state of ``state_bytes`` and a step of
some milliseconds all the same.

``cost`` is what a step costs more when its rank is in a Run with others, and nothing happens. Every
rank measures; all come to the same blocks in the same order. Arms: bare DDP; DDP in a Run, a safe
point after each step; bare DDP with a flag that all ranks sum after each step, to learn whether one
of them was signalled, as Megatron-LM and Lightning do; and bare once more.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

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
SEED = 3

AfterStep = Callable[[], object]


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


class Bench:
    """One model and its optimizer for all arms of ``cost``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blocks = 0
        self.model = DistributedDataParallel(steps.transformer().model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self._data = torch.randn(BATCH, LENGTH, WIDTH)

    def step(self) -> None:
        """Forward, backward, optimizer."""
        self.optimizer.zero_grad()
        self.model(self._data).square().mean().backward()
        self.optimizer.step()

    @contextlib.contextmanager
    def in_a_run(self) -> Iterator[AfterStep]:
        """A Run of all ranks, with a folder and a coordinator of its own."""
        self._blocks += 1
        name = f"run-{self._blocks}"
        run = hydroslurm.Run(
            model=self.model,
            optimizer=self.optimizer,
            directory=self._folder / name,
            environ={**os.environ, "TORCHELASTIC_RUN_ID": f"{self._folder}/{name}"},
        )
        with run:
            run.resume()

            def after_step() -> None:
                run.step += 1
                run.safe_point()

            yield after_step

    @contextlib.contextmanager
    def bare(self) -> Iterator[AfterStep]:
        """Nothing of ours, a moment after something of ours: setting it up touches much memory, and
        cold caches would count against one arm only."""
        with self.in_a_run():
            pass
        yield lambda: None

    @contextlib.contextmanager
    def with_flag(self) -> Iterator[AfterStep]:
        """The peers' way: is anybody to stop?"""
        with self.bare():
            flag = torch.zeros(1)

            def after_step() -> None:
                dist.all_reduce(flag, op=dist.ReduceOp.MAX)
                if flag.item():
                    raise AssertionError("nobody is to stop here")

            yield after_step


def measure_cost(folder: Path, *, rounds: int, count: int) -> None:
    """Write the seconds per step of each arm in each round, as rank 0 sees them, to
    ``folder/cost.json``.

    The arms of a round come in an order of chance, the same on all ranks, so that none always comes
    after the same other one.
    """
    bench = Bench(folder)
    arms: dict[str, Callable[[], AbstractContextManager[AfterStep]]] = {
        "bare": bench.bare,
        "run": bench.in_a_run,
        "flag": bench.with_flag,
        "again": bench.bare,
    }
    chance = random.Random(SEED)
    seen: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name in chance.sample(list(arms), len(arms)):
            with arms[name]() as after_step:
                seen[name].append(_seconds_per_step(bench, after_step, count))
    if dist.get_rank() == 0:
        (folder / "cost.json").write_text(json.dumps(seen))


def _seconds_per_step(bench: Bench, after_step: AfterStep, count: int) -> float:
    for _ in range(max(2, count // 3)):
        bench.step()
        after_step()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        bench.step()
        after_step()
    return (time.perf_counter() - begin) / count


def be_rank(options: dict[str, Any], rank: int) -> None:
    """One rank of this attempt, from its process group to its end."""
    folder = Path(options["folder"])
    dist.init_process_group(
        "gloo", init_method=f"file://{options['meet']}", rank=rank, world_size=options["world"]
    )
    if options["what"] == "cost":
        measure_cost(folder, rounds=options["rounds"], count=options["steps"])
    else:
        train(folder / "run", state_bytes=options["state_bytes"])


if __name__ == "__main__":
    serve(be_rank)
