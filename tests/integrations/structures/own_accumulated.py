"""Gradients of three batches, added up by the loop itself."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(48, 4)), 4, shuffle=True)
with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for number, (x,) in enumerate(run.batches(epochs=3), run.step):
        loss = model(x).square().mean()
        (loss / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        print("=", number, repr(loss.item()))
