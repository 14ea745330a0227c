"""Buffers that the state leaves out, of a model that was given as model=."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm


class Queued(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.place = torch.nn.Linear(4, 1), 0
        self.register_buffer("queue", torch.zeros(8, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x) + self.linear(self.queue.clone()).mean()
        self.queue[self.place] = x[0].detach()
        self.place = (self.place + 1) % 8
        return made


torch.manual_seed(0)
model = Queued()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for (x,) in run.batches(epochs=3):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
