"""What a loop keeps in its variables: an average in a dict, the best so far, meters, a buffer."""

from __future__ import annotations

import random
from collections import defaultdict, deque

import torch
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm


class AverageMeter:
    def __init__(self) -> None:
        self.sum = self.count = 0.0

    def update(self, value: float) -> None:
        self.sum, self.count = self.sum + value, self.count + 1


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
ema = {name: one.detach().clone() for name, one in model.named_parameters()}
best, patience, meter, history = float("inf"), 0, AverageMeter(), defaultdict(list)
memory, rng = deque(maxlen=5), random.Random(3)
with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for (x,) in run.batches(epochs=3):
        memory.append(x)
        loss = model(torch.cat([x, rng.choice(memory)])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, one in model.named_parameters():
            ema[name].lerp_(one.detach(), 0.1)
        best, patience = (loss.item(), 0) if loss < best else (best, patience + 1)
        meter.update(loss.item())
        history["loss"].append(best)
        print("=", best, patience, meter.sum, meter.count, ema["0.weight"].sum().item())
print("=", history)
