"""What test_stock_submitit.py submits: `submitted.py FOLDER [SECONDS]` runs it by itself. It makes
slow steps until there is a file ``hurry`` in its folder."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm
from hydroslurm.data import ResumableSampler

EPOCHS, STEPS = 40, 1000


def train(folder: Path, *, think_s: float = 0.1) -> dict[str, Any]:
    """Saves only when it is stopped; returns a hash of weights, optimizer and random numbers."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(200, 16))
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    with hydroslurm.Run(
        model=model,
        optimizer=optimizer,
        loader=DataLoader(data, batch_size=8, sampler=ResumableSampler(data, seed=0)),
        directory=None if "SLURM_JOB_ID" in os.environ else folder / "run",
        every_steps=0,
        every_s=0,
    ) as run:
        for (batch,) in run.batches(epochs=EPOCHS):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if not (folder / "hurry").exists():
                time.sleep(think_s)
        state = [model.state_dict(), optimizer.state_dict(), torch.rand(3)]
        torch.set_printoptions(precision=17, threshold=10_000_000)
        return {"steps": run.step, "sha256": hashlib.sha256(repr(state).encode()).hexdigest()}


if __name__ == "__main__":
    where, think_s = [*sys.argv[1:], "0"][:2]
    print(json.dumps(train(Path(where), think_s=float(think_s))))
