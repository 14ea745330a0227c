"""What a loop with accelerate keeps in its variables."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from hydroslurm.integrations.accelerate import epochs, prepare


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    ema = {name: one.detach().clone() for name, one in model.named_parameters()}
    best, patience, seen = float("inf"), 0, []
    for _ in epochs(accelerator, 3):
        for (x,) in loader:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            for name, one in model.named_parameters():
                ema[name].lerp_(one.detach(), 0.1)
            best, patience = (loss.item(), 0) if loss < best else (best, patience + 1)
            seen.append(best)
            print("=", seen[-2:], len(seen), patience, ema["weight"].sum().item())


main()
