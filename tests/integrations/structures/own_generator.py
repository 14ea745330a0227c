"""A generator of numbers that the loop moves by next()."""

from __future__ import annotations

import torch

import hydroslurm


def curriculum():
    length = 1
    while True:
        yield length
        length += 1


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
lengths = curriculum()
with hydroslurm.Run(model=model, optimizer=optimizer) as run:
    for _ in run.steps(18):
        loss = model(torch.randn(next(lengths), 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
