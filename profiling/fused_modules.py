"""A GPT written out by hand (norms, attention, GELU) before and after `optimize_modules`, and its
optimizer before and after `optimize_optimizer`.

`step_ratio`: a training step (forward, backward, AdamW) of the optimised model to the same step of
the other, the median over interleaved rounds in one process on one core; `again_ratio`: of an
untouched copy to the other, measured in the same way. `modules_replaced` of `modules`: those of
which a rewriter knows something.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import torch
from harness import finish, interleaved, median_ratio, options
from integrations.fused_models import GPT
from torch import nn

import hydroslurm

WORDS, WIDTH, HEADS, LAYERS, BATCH = 256, 256, 8, 4, 4


def main() -> None:
    chosen = options(__doc__ or "")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    length, rounds = (64, 3) if chosen.quick else (512, 11)
    tokens = torch.randint(WORDS, (BATCH, length + 1))
    batch = (tokens[:, :-1], tokens[:, 1:])
    own = GPT(width=WIDTH, heads=HEADS, length=length, layers=LAYERS, words=WORDS)
    models = {"own": own, "again": copy.deepcopy(own), "fused": copy.deepcopy(own)}
    table = hydroslurm.optimize_modules(models["fused"], batch)
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    ways = hydroslurm.optimize_optimizer(optimizers["fused"])
    if not chosen.json:
        print(table, ways, sep="\n")
    arms = {name: partial(step_s, models[name], batch, optimizers[name]) for name in models}
    for arm in arms.values():
        arm()
    seen = interleaved(arms, rounds=rounds)
    rows = [row for row in table if row.names != ("",)]
    result = {
        "step_ratio": median_ratio(seen, "fused", "own"),
        "again_ratio": median_ratio(seen, "again", "own"),
        "modules": sum(len(row.names) for row in rows),
        "modules_replaced": sum(len(row.names) for row in rows if row.applied),
    }
    finish(chosen, "A GPT written by hand, in PyTorch's fused forms:", result)


def step_s(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> float:
    """Seconds of a training step."""
    begin_s = time.perf_counter()
    model.zero_grad()
    model(*batch).backward()
    optimizer.step()
    return time.perf_counter() - begin_s


if __name__ == "__main__":
    main()
