"""The job that stop.py and killwait.py stop: trains until it is cancelled.

    requeued_job.py STATE_BYTES ATTEMPTS_FOLDER

Its state is as large as asked for, and its step is quick all the same: four large tables of which a
step changes a few rows, and a stack of many small layers.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from attempts import AttemptLog
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm
from hydroslurm.data import ResumableSampler

WIDTH = 32
LAYERS = 50
TABLES = 4


class Net(nn.Module):
    def __init__(self, state_bytes: int) -> None:
        super().__init__()
        rows = max(1000, state_bytes // (4 * WIDTH * TABLES))
        self.tables = nn.ModuleList(
            nn.Embedding.from_pretrained(torch.zeros(rows, WIDTH), freeze=False, sparse=True)
            for _ in range(TABLES)
        )
        layers = [(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*itertools.chain.from_iterable(layers))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        looked_up = [table(column) for table, column in zip(self.tables, rows.T, strict=True)]
        out: torch.Tensor = self.layers(torch.stack(looked_up).sum(dim=0))
        return out


def main() -> None:
    state_bytes, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(1000, (4096, TABLES)), torch.randn(4096, WIDTH))
    loader = DataLoader(data, batch_size=8, sampler=ResumableSampler(data, seed=0))
    model = Net(state_bytes)
    tables = torch.optim.SGD(model.tables.parameters(), lr=0.1)
    layers = torch.optim.Adam(model.layers.parameters())
    run = hydroslurm.Run(
        model=model,
        optimizer=layers,
        extra={"tables_optimizer": tables},
        loader=loader,
        every_steps=0,  # only what the stops save counts here
        every_s=0,
    )
    run.resume()
    attempt = AttemptLog(folder, run.step)
    for rows, wanted in run.batches(epochs=1_000_000):
        loss = (model(rows) - wanted).square().mean()
        loss.backward()
        for optimizer in (tables, layers):
            optimizer.step()
            optimizer.zero_grad()
        attempt.made(run.step + 1)


if __name__ == "__main__":
    main()
