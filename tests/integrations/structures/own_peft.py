"""An own loop with :mod:`adapted`."""

from __future__ import annotations

import torch
from adapted import adapted, allocate
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm

torch.manual_seed(0)
model = adapted()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for (x,) in run.batches(epochs=3):
        loss = model(x).loss
        loss.backward()
        optimizer.step()
        ranks = allocate(model, run.step)
        optimizer.zero_grad()
        print("=", run.step, repr(loss.item()), ranks)
