"""What a step costs more when its rank is in a Run with others, and nothing happens.

Every rank measures; all come to the same blocks in the same order. Arms: bare DDP; DDP in a Run,
installed and connected with the other ranks, a safe point behind each step; bare DDP with a flag
that all ranks sum behind each step, to learn whether one of them was signalled, as Megatron-LM and
Lightning do; and bare once more.
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

import steps
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hydroslurm

AfterStep = Callable[[], object]
SEED = 3
LIMIT_S = 300.0
BATCH = 8


class Bench:
    """One model and its optimizer for all arms."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blocks = 0
        self.model = DistributedDataParallel(steps.transformer().model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self._data = torch.randn(BATCH, 32, 16)

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
        environ = {**os.environ, "TORCHELASTIC_RUN_ID": f"{self._folder}/{name}"}
        run = hydroslurm.Run(
            model=self.model,
            optimizer=self.optimizer,
            directory=self._folder / name,
            environ=environ,
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


def measure(folder: Path, *, rounds: int, steps_per_block: int) -> None:
    """Write the seconds per step of each arm in each round, as rank 0 sees them, to
    ``folder/cost.json``.

    The arms of a round come in an order of chance, the same on all ranks, so that none always comes
    behind the same other one. On a machine that has much else to do no round begins after LIMIT_S.
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
    deadline = time.monotonic() + LIMIT_S
    for _ in range(rounds):
        if _is_late(deadline):
            break
        for name in chance.sample(list(arms), len(arms)):
            with arms[name]() as after_step:
                seen[name].append(_seconds_per_step(bench, after_step, steps_per_block))
    if dist.get_rank() == 0:
        (folder / "cost.json").write_text(json.dumps(seen))


def _is_late(deadline_s: float) -> bool:
    """As the first rank sees it, for all."""
    late = torch.tensor(time.monotonic() > deadline_s)
    dist.broadcast(late, src=0)
    return bool(late.item())


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
