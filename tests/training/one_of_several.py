"""A training of one weight, to which each step adds ``--lr``; several of them, if it is told so.
Prints where it begins, each step, and the weight at the end."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import hydroslurm

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--runs", type=int, default=1)
parser.add_argument("--step-s", type=float, default=0.05)
parser.add_argument("--until", type=Path, default=Path(), help="no last step before it is there")
asked = parser.parse_args()
for number in range(asked.runs):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    with hydroslurm.Run(model=model, every_steps=1000) as run:
        run.resume()
        print(asked.name, number, "began at", run.step, flush=True)
        while run.step < asked.steps:
            with torch.no_grad():
                model.weight += asked.lr + number
            time.sleep(asked.step_s)
            run.step += 1
            run.safe_point()
            while run.step == asked.steps - 1 and not asked.until.exists():
                time.sleep(0.01)
                run.safe_point()
            print(asked.name, number, "step", run.step, flush=True)
        print(asked.name, number, "ends at", f"{model.weight.item():g}", flush=True)
