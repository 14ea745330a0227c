"""HFAI's two calls in a loop that saves in its own way, with torch.save.

`receive_suspend_command()` says after each step whether it is time to save and leave;
`go_suspend()` has the job requeued and leaves. Ended by SIGTERM and started again as often as you
like, it comes to the weights of one that was left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm

JOB = os.environ.get("SLURM_JOB_ID", "alone")  # a requeue keeps it


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--think-s", type=float, default=0.0)
    parser.add_argument("--save", type=Path, default=Path(f"two-calls-{JOB}.pt"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    hydroslurm.receive_suspend_command()  # before the loader's workers: a stop is to spare them
    torch.manual_seed(0)
    data, order = TensorDataset(torch.randn(1440, 8)), torch.Generator()
    loader = DataLoader(data, args.batch_size, shuffle=True, num_workers=1, generator=order)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = 0
    if args.save.exists():
        saved = torch.load(args.save, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    print(f"begins at step {step}", flush=True)
    while step < args.epochs * len(loader):
        epoch, done = divmod(step, len(loader))
        order.manual_seed(epoch)  # each epoch has its own order, in every attempt
        for number, (inputs,) in enumerate(loader):
            if number < done:  # trained before the stop
                continue
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
            if not Path("hurry").exists():
                time.sleep(args.think_s)
            if step % args.log_every == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            if hydroslurm.receive_suspend_command():
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step}, args.save)
                print(f"saved step {step} in {args.save}", flush=True)
                hydroslurm.go_suspend()
    weights = [parameter.tolist() for parameter in model.parameters()]
    args.out.write_text(json.dumps({"steps": step, "weights": weights}))


if __name__ == "__main__":
    main()
