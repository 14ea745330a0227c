"""Gradients of three batches, added up by a loop with accelerate itself."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from hydroslurm.integrations.accelerate import completed_steps, epochs, prepare

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(48, 4)), 4, shuffle=True)
model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
number = completed_steps(accelerator)
for _ in epochs(accelerator, 3):
    for (x,) in loader:
        loss = model(x).square().mean()
        accelerator.backward(loss / 3)
        number += 1
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        print("=", number, repr(loss.item()))
