"""Train on handwritten digits in a loop of your own, with `hydroslurm.Run`. Copy it under any name.

    python train_run.py --directory runs/digits         # SIGTERM saves; the same command resumes
    hydroslurm submit --partition low train_run.py      # preempted, requeued and resumed by Slurm

The hash of the final weights is the same with and without stops.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm
from hydroslurm.data import ResumableSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", help="run folder; in a job: hydroslurm-runs/JOBID")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (30)")
    parser.add_argument("--log-every", type=int, default=50, help="steps between two lines (50)")
    parser.add_argument("--think-s", type=float, default=0.0, help="sleep in each step (0)")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the order of additions depends on it
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    order = torch.randperm(len(images))  # 1,797 images of 8 x 8 pixels
    images, labels = images[order].float() / 16, labels[order]
    data = TensorDataset(images[360:], labels[360:])
    sampler = ResumableSampler(data, seed=0)  # instead of shuffle=True
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = args.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    with hydroslurm.Run(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        directory=args.directory,
        every_steps=200,  # a checkpoint against crashes; a stop saves in any step
    ) as run:
        for x, y in run.batches(epochs=args.epochs):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            time.sleep(args.think_s)
            if (run.step + 1) % args.log_every == 0:
                print(f"epoch {run.epoch} step {run.step + 1} loss {loss.item():.4f}", flush=True)

        model.eval()
        with torch.no_grad():
            accuracy = (model(images[:360]).argmax(1) == labels[:360]).float().mean().item()
        weights = b"".join(w.numpy().tobytes() for w in model.state_dict().values())
        digest = hashlib.sha256(weights).hexdigest()
        print(f"accuracy {accuracy:.2%} on 360 test images\nweights sha256 {digest}", flush=True)


if __name__ == "__main__":
    main()
