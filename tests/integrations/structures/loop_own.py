"""An own loop over one of the structures."""

from __future__ import annotations

import torch
from structures import after_step, dataset, loading
from torch.utils.data import DataLoader

import hydroslurm

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
data = dataset()
loader = DataLoader(data, **loading(data))
with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for batch in run.batches(epochs=3):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("=", run.step, repr(loss.item()))
        after_step(loader, run.step, loss.item())
