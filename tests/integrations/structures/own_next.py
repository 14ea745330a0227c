"""Batches from an iterator that the loop moves by next()."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm


def endless(loader):
    while True:
        yield from loader


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = endless(DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True))
with hydroslurm.Run(model=model, optimizer=optimizer) as run:
    for _ in run.steps(18):
        (x,) = next(batches)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
