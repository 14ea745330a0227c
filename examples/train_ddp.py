"""Train on handwritten digits with many ranks: DistributedDataParallel inside `hydroslurm.Run`.

    torchrun --nproc-per-node=2 train_ddp.py --directory runs/ddp
    srun -N2 -n4 python train_ddp.py                     # one task per rank
    sbatch sbatch/multi-node.sbatch                      # 4 nodes, preemptible

With the same number of ranks a stopped training ends with the bits of an uninterrupted one. With
another number every sample still comes once per epoch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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

    hydroslurm.set_torch_environment()  # what torchrun sets, where srun started the ranks
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the order of additions depends on it
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)  # 1,797 images of 8 x 8 pixels
    sampler = ResumableSampler(data, seed=0)  # each rank gets its share of one order
    loader = DataLoader(data, batch_size=64 // world_size, sampler=sampler)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(1 + rank)  # each rank its own dropout

    with hydroslurm.Run(
        model=model, optimizer=optimizer, loader=loader, directory=args.directory, every_steps=200
    ) as run:
        for x, y in run.batches(epochs=args.epochs):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            time.sleep(args.think_s)
            if rank == 0 and (run.step + 1) % args.log_every == 0:
                print(f"epoch {run.epoch} step {run.step + 1} loss {loss.item():.4f}", flush=True)

    if rank == 0:
        weights = b"".join(w.cpu().numpy().tobytes() for w in network.state_dict().values())
        print(f"weights sha256 {hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
