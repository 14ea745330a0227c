"""Handwritten digits, on nodes that come and go: `hydroslurm submit examples/elastic.yaml`.

Beyond DistributedDataParallel it needs a ResumableSampler and the Run around the loop. Each member
starts alone and joins the others at its Run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm
from hydroslurm.data import ResumableSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank, at full size")
    parser.add_argument("--step-s", type=float, default=0.0, help="sleep so long in each step")
    parser.add_argument("--log", type=Path, help="a folder: each step's samples, by rank")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    dist.init_process_group("gloo")  # the ranks of this node
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels, torch.arange(len(images)))
    loader = DataLoader(data, batch_size=chosen.batch_size, sampler=ResumableSampler(data, seed=1))
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
        for images, labels, numbers in run.batches(epochs=chosen.epochs):
            if chosen.log is not None:
                _note(chosen.log, run, numbers.tolist())
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(chosen.step_s)
    with torch.no_grad():
        net.eval()
        right = (net(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean().item()
        weights = sum(one.double().sum().item() for one in net.parameters())
    print(f"accuracy {right:.3f} after {run.step} steps, weights {weights:.12f}", flush=True)


def _note(folder: Path, run: hydroslurm.Run, samples: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    said = {
        "step": run.step,
        "generation": run.generation,
        "samples": samples,
        "ranks": dist.get_world_size(),
    }
    with (folder / f"{os.environ.get('SLURM_JOB_ID', os.getpid())}.jsonl").open("a") as log:
        log.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
