"""A training loop with checkpoints of its own: right, or with the mistake that was asked for."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

mistake = sys.argv[1]
checkpoint = Path(f"checkpoint{os.environ.get('SLURM_PROCID', 0)}.pt")
if mistake == "fails":
    sys.exit("no data here")
torch.manual_seed(torch.seed() % 1000 if mistake == "unseeded" else 0)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(1)
asked: list[int] = []
signal.signal(signal.SIGTERM, lambda signo, _: asked.append(signo))

saved: dict[str, Any] = {"epoch": 0, "used": 0, "order": generator.get_state()}
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
for epoch in range(saved["epoch"], 4):
    if epoch == saved["epoch"] and mistake != "order":
        generator.set_state(saved["order"])
    order = generator.get_state()
    used = 0
    for inputs, targets in DataLoader(data, batch_size=8, shuffle=True, generator=generator):
        used += 1
        if epoch == saved["epoch"] and used <= saved["used"]:
            if used == saved["used"]:
                torch.set_rng_state(saved["rng"])
            continue

        def closure(batch: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), targets)
            loss.backward()
            return loss

        if mistake == "nothing":  # as LBFGS needs it, and Lightning does it with all
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if asked:
            state = {"epoch": epoch, "used": used, "order": order, "rng": torch.get_rng_state()}
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, checkpoint)
            sys.exit(75)
