"""A training with a Run that somebody else ends: ``endless.py EVERY_STEPS STEP_S``. It saves after
twenty steps, also where it saves no more."""

from __future__ import annotations

import sys
import time

import torch

import hydroslurm


def main() -> None:
    every_steps, step_s = int(sys.argv[1]), float(sys.argv[2])
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = hydroslurm.Run(model=model, optimizer=optimizer, every_steps=every_steps)
    run.resume()
    while True:
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        run.step += 1
        run.safe_point()
        if run.step == 20 and not every_steps:
            run.save()
        time.sleep(step_s)


if __name__ == "__main__":
    main()
