"""A loop of one's own with Lightning Fabric, and a Run around it.

python fabric_digits.py [--devices N] [--workers N] [--accumulate N] [--pause-s S]
"""

import argparse
import time
from pathlib import Path

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--pause-s", type=float, default=0.0)
args = parser.parse_args()

fabric = Fabric(accelerator="cpu", devices=args.devices)
fabric.launch()
fabric.seed_everything(1)
data = load_digits()
images = torch.tensor(data.data[:1536], dtype=torch.float32) / 16
train = TensorDataset(images, torch.tensor(data.target[:1536]))
model = torch.nn.Sequential(
    torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(train, 16, shuffle=True, num_workers=args.workers))
out = Path("out")
out.mkdir(exist_ok=True)
with (
    hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run,
    (out / f"losses-{fabric.global_rank}").open("a") as losses,
):
    batches = run.batches(epochs=2, accumulate=args.accumulate)
    for number, (inputs, labels) in enumerate(batches, start=1):
        is_last = number % args.accumulate == 0  # stops come behind whole steps only
        with fabric.no_backward_sync(model, enabled=not is_last and args.devices > 1):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            fabric.backward(loss / args.accumulate)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(args.pause_s)
            print(run.epoch, repr(loss.item()), file=losses, flush=True)
            print("step", run.step, flush=True)
if fabric.is_global_zero:
    torch.save(model.state_dict(), out / "final.pt")
