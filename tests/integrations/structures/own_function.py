"""The same within a function, whose variables nobody else has; rebound in each step."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
    total, losses, scale = 0.0, [], torch.ones(())
    with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
        for (x,) in run.batches(epochs=3):
            loss = model(x).square().mean() * scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            losses = [*losses[-3:], loss.item()]
            scale = scale * 0.9 + min(losses) * 0.1
            print("=", run.step, total, losses)


main()
