"""LBFGS with closures, and a model that is pruned on the way."""

from __future__ import annotations

import torch
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
prune.l1_unstructured(model, "weight", amount=0.25)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for (x,) in run.batches(epochs=3):

        def closure(x=x):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        print("=", run.step, repr(optimizer.step(closure).item()))
        if run.step % 6 == 5:
            prune.l1_unstructured(model, "weight", amount=0.25)
