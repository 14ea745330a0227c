"""An own loop with :mod:`adalora`."""

from __future__ import annotations

import torch
from adalora import Adapted
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm

torch.manual_seed(0)
model = Adapted()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for (x,) in run.batches(epochs=3):
        loss = model(x)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.peft_allocators["default"].update(model)
        print("=", run.step, repr(loss.item()), model.lora_e.sum().item())
