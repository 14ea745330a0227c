"""A DistributedDataParallel training of handwritten digits as one finds it anywhere.

It knows nothing of hydroslurm, and takes RANK, WORLD_SIZE and MASTER_ADDR from its environment.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def digits() -> TensorDataset:
    """1,797 images of 8 x 8, as rows of 64 numbers from 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.from_numpy(images).float() / 16, torch.from_numpy(labels))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    data = digits()
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=True)
    model = DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=64, sampler=sampler):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    right = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
    weights = sum(p.double().sum() for p in model.parameters()).item()
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()}, local {os.environ['LOCAL_RANK']}: "
        f"accuracy {right:.3f}, weights {weights:.12f}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
