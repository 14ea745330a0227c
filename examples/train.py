"""Train a small CNN on handwritten digits: an ordinary PyTorch script.

    hydroslurm run -- python train.py               # hydroslurm pause --pid PID
    hydroslurm submit --partition low train.py      # the same as a Slurm job
    python train.py --pausable                      # pausable by a line of the script

The hash of the final weights is the same with and without pauses.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=2000, help="training steps (2000)")
    parser.add_argument("--log-every", type=int, default=50, help="steps between two lines (50)")
    parser.add_argument("--pausable", action="store_true", help="call od_execution_wrapper(model)")
    parser.add_argument("--out", type=Path, help="write accuracy and weights' hash as JSON")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the order of additions depends on it
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    order = torch.randperm(len(images))  # 1,797 images of 8 x 8 pixels
    images, labels = images[order].float().reshape(-1, 1, 8, 8) / 16, labels[order]
    loader = DataLoader(TensorDataset(images[360:], labels[360:]), batch_size=64, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(48 * 16, 10),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if args.pausable:
        import hydroslurm

        model = hydroslurm.od_execution_wrapper(model)
    began = time.perf_counter()
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, (x, y) in enumerate(itertools.islice(batches, args.iterations), start=1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        if step % args.log_every == 0 or step == args.iterations:  # a pause shows as a slow line
            seconds = time.perf_counter() - began
            print(
                f"step {step}/{args.iterations} loss {loss.item():.4f} {seconds:.1f} s", flush=True
            )
            began = time.perf_counter()

    with torch.no_grad():
        right = model(images[:360].to(device)).argmax(1).cpu() == labels[:360]
    accuracy = right.float().mean().item()
    weights = b"".join(w.cpu().numpy().tobytes() for w in model.state_dict().values())
    digest = hashlib.sha256(weights).hexdigest()
    print(f"accuracy {accuracy:.2%} on 360 test images\nweights sha256 {digest}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"accuracy": accuracy, "weights_sha256": digest}))


if __name__ == "__main__":
    main()
