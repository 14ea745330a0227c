"""A model that gets a layer in its second epoch."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for (x,) in run.batches(epochs=3):
        if run.epoch == 1 and len(model) == 1:
            model.append(torch.nn.Linear(4, 4))
            optimizer.add_param_group({"params": list(model[1].parameters())})
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
