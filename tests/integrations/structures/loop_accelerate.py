"""A loop with accelerate over one of the structures."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from structures import after_step, dataset, loading
from torch.utils.data import DataLoader

from hydroslurm.integrations.accelerate import completed_steps, epochs, prepare

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
data = dataset()
own = DataLoader(data, **loading(data))
model, optimizer, loader = prepare(accelerator, model, optimizer, own)
steps = completed_steps(accelerator)
for _ in epochs(accelerator, 3):
    for batch in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        print("=", steps, repr(loss.item()))
        after_step(own, steps, loss.item())
