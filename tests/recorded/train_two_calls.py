"""Train on the digits with HFAI's two calls: a loop that saves in its own way, with torch.save.

    python train_two_calls.py                               # SIGTERM saves
    hydroslurm submit --partition low train_two_calls.py    # in a preemptible partition

`receive_suspend_command()` says after each step whether it is time to save and leave;
`go_suspend()` has the job requeued and leaves. What lies between is the loop's own affair, and so
is going on: `hydroslurm.Run` (train_run.py) does all of it. End it with SIGTERM and start it again
as often as you like: the final weights are bit for bit those of a run that was left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from demo_digits import (
    digits_tensors,
    evaluate,
    hash_weights,
    make_deterministic,
    make_model,
    options,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm


def main() -> None:
    args = parse_arguments()
    hydroslurm.receive_suspend_command()  # before the loader's workers: a stop is to spare them
    make_deterministic(args.seed)
    train_x, train_y, test_x, test_y = digits_tensors(seed=args.seed)
    order = torch.Generator()
    loader = DataLoader(
        TensorDataset(train_x, train_y),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        generator=order,
    )
    model = make_model(width=args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    step = load(args.save, model, optimizer)
    print(f"begins at step {step}", flush=True)
    while step < args.epochs * len(loader):
        epoch, done = divmod(step, len(loader))
        order.manual_seed(args.seed + epoch)  # each epoch has its own order, in every attempt
        for number, (images, labels) in enumerate(loader):
            if number < done:  # trained before the stop
                continue
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            step += 1
            time.sleep(args.think_s)
            if step % args.log_every == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            if hydroslurm.receive_suspend_command():
                save(args.save, model, optimizer, step=step)
                hydroslurm.go_suspend()

    test = DataLoader(TensorDataset(test_x, test_y), batch_size=512)
    print(f"accuracy {evaluate(model, test):.2%} on {len(test_y)} test images", flush=True)
    print(f"weights  sha256 {hash_weights(model)}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"steps": step, "weights_sha256": hash_weights(model)}))


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int) -> None:
    """Put a checkpoint in the place of the one before, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file
        )
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    print(f"saved step {step} in {path}", flush=True)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Go on from the checkpoint; returns the step that it is of, 0 where there is none."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def parse_arguments() -> argparse.Namespace:
    job = os.environ.get("SLURM_JOB_ID", "alone")  # a requeue keeps it
    parser = options(__doc__, batch_size=64, width=24)
    save = Path(f"two-calls-{job}.pt")
    parser.add_argument("--save", type=Path, default=save, help="the checkpoint file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
