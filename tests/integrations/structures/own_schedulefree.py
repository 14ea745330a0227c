"""Without a schedule: an optimizer that keeps two points, and which is set to train and to eval."""

from __future__ import annotations

import torch
from schedulefree import AdamWScheduleFree
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = AdamWScheduleFree(model.parameters(), lr=0.05, warmup_steps=3)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
    while run.epoch < 3:
        optimizer.train()
        for (x,) in run.batches(epochs=run.epoch + 1):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("=", run.step, repr(loss.item()))
        optimizer.eval()
        print("= evaluated", run.epoch, model.weight.sum().item())
