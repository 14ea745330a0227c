"""Another optimizer from the second epoch on."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
late = False
with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for (x,) in run.batches(epochs=3):
        if run.epoch == 1 and not late:
            optimizer, late = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), True
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
