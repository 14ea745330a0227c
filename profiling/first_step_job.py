"""The training that startup.py times from the start of its process to the end of its first step.

    first_step_job.py run FOLDER       with a hydroslurm.Run, which resumes
    first_step_job.py bare FILE        with torch alone: torch.load and load_state_dict

Both train the same model with the same optimizer on the same data. Each prints CLOCK_MONOTONIC in
nanoseconds behind its first step, and ends at once. Where there is nothing to resume from, it saves
behind that step.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, WIDTH = 65_536, 64
"""Of the table, which is most of the state: with Adam's two moments 50 MB."""


def training() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(50)]
    model = nn.Sequential(nn.EmbeddingBag(ROWS, WIDTH), *layers)
    data = TensorDataset(torch.randint(ROWS, (256, 8)), torch.randn(256, WIDTH))
    return model, torch.optim.Adam(model.parameters()), data


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    rows, wanted = batch
    (model(rows) - wanted).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def with_run(folder: Path) -> Iterator[None]:
    """Yields behind the first step, where the state may be saved."""
    import hydroslurm
    from hydroslurm.data import ResumableSampler

    model, optimizer, data = training()
    run = hydroslurm.Run(
        model=model,
        optimizer=optimizer,
        loader=DataLoader(data, batch_size=8, sampler=ResumableSampler(data, seed=0)),
        directory=folder,
        limits=hydroslurm.Limits(failures=None, attempts_without_progress=None),
    )
    resumed = run.resume()
    first = run.step
    for batch in run.batches(epochs=1_000_000):
        if run.step > first:  # past the safe point of its first step
            break
        step(model, optimizer, batch)
    yield
    if not resumed:
        run.save()


def bare(file: Path) -> Iterator[None]:
    model, optimizer, data = training()
    resumed = file.exists()
    if resumed:
        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    step(model, optimizer, next(iter(DataLoader(data, batch_size=8, shuffle=True))))
    yield
    if not resumed:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)


def main() -> None:
    training = {"run": with_run, "bare": bare}[sys.argv[1]]
    for _ in training(Path(sys.argv[2])):
        print(time.monotonic_ns(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
