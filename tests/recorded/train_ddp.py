"""The digits with many ranks, DistributedDataParallel or FSDP2 inside `hydroslurm.Run`, and a
record of all that they compute.

However often it is stopped, with the same number of ranks losses, weights and optimizer are bit for
bit those of a run that was left alone. With another number every sample still comes once; with
`--dropout 0 --no-batch-norm` the losses stay the same too, up to rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hydroslurm
from hydroslurm.data import ResumableSampler, SeededDataset

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from demo_digits import digits_tensors, evaluate, hash_tree, make_deterministic, options, positive

IMAGES = 1428  # 12 x 119: can be divided by 1, 2, 3, 4 and 6 ranks, so that none has to repeat any


def main() -> None:
    args = parse_arguments(__doc__)
    with process_group(args):
        train(args)


def make_model(args: argparse.Namespace) -> nn.Module:
    def block(inputs: int) -> list[nn.Module]:
        norm = [nn.BatchNorm1d(args.width)] if args.batch_norm and not args.fsdp else []
        return [nn.Linear(inputs, args.width), *norm, nn.ReLU(), nn.Dropout(args.dropout)]

    model = nn.Sequential(nn.Flatten(), *block(64), *block(args.width), nn.Linear(args.width, 10))
    if not args.fsdp:
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(args: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    make_deterministic(args.seed)
    train_x, train_y, test_x, test_y = digits_tensors(seed=args.seed)
    data = SeededDataset(NoisyDigits(train_x[:IMAGES], train_y[:IMAGES]), seed=args.seed)
    loader = DataLoader(
        data,
        batch_size=args.batch_size // world_size,  # the steps are then those of any number of ranks
        sampler=ResumableSampler(data, seed=args.seed),
        num_workers=args.workers,
    )
    model = make_model(args)  # the same weights on all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=args.epochs * len(loader)
    )
    torch.manual_seed(args.seed + 1 + rank)  # for dropout: each rank its own

    with hydroslurm.Run(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        directory=args.directory,
        every_steps=args.every_steps,
    ) as run:
        run.resume()
        diary = Diary(run.dir.root / "diary")
        for images, labels, indexes in run.batches(epochs=args.epochs):
            model.train()
            optimizer.zero_grad()
            outputs = model(images)
            loss = nn.functional.cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step = run.step + 1
            diary.write(step=step, epoch=run.epoch, loss=loss, indexes=indexes)
            time.sleep(args.think_s)
            if rank == 0 and step % args.log_every == 0:
                print(f"epoch {run.epoch} step {step} loss {loss.item():.4f}", flush=True)

        test = DataLoader(TensorDataset(test_x, test_y), batch_size=512)
        accuracy = evaluate(model, test)
        weights, optimizer_state = full_state(model, optimizer)
        dist.barrier()  # all of it is written
        if rank == 0:
            print(f"accuracy {accuracy:.2%} on {len(test_y)} test images", flush=True)
            print(f"weights  sha256 {hash_tree(weights)}", flush=True)
            if args.out is not None:
                result = {
                    "steps": run.step,
                    "world_size": world_size,
                    "accuracy": accuracy,
                    "weights_sha256": hash_tree(weights),
                    "optimizer_sha256": hash_tree(optimizer_state),
                    **read_diary(run.dir.root / "diary", epochs=args.epochs),
                }
                args.out.write_text(json.dumps(result) + "\n")


@contextlib.contextmanager
def process_group(args: argparse.Namespace) -> Iterator[None]:
    hydroslurm.set_torch_environment()  # what torchrun would have set, where srun started the ranks
    # ranks may come seconds apart: a short time-out is for collectives, and not for their meeting
    store, rank, world_size = next(dist.rendezvous("env://"))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=args.collective_timeout_s),
    )
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} cannot be divided by {world_size} ranks")
    try:
        yield
    finally:
        dist.destroy_process_group()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Weights and optimizer as one rank would have them, for rank 0; all ranks call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_state_dict(model, optimizer, options=options)


class NoisyDigits(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Digits with noise, so that the random numbers of workers count, and the number of each; -1
    for a sample that comes a second time, to give all ranks equally many."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
        number = int(index) if index.position < len(self) else -1
        image = self.images[index]
        return image + 0.1 * torch.randn_like(image), self.labels[index], number


class Diary:
    """The steps of this rank, over all attempts, in its own file: a line of JSON for each, with its
    exact loss and its samples. ``attempt`` is the same on all ranks."""

    def __init__(self, folder: Path) -> None:
        attempt = torch.tensor([time.time_ns()])
        dist.broadcast(attempt, src=0)
        self.place = {"attempt": int(attempt.item()), "rank": dist.get_rank()}
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{dist.get_rank():05d}.jsonl"
        self._append("\n")  # an attempt that was killed may have left half a line

    def write(self, *, step: int, epoch: int, loss: torch.Tensor, indexes: torch.Tensor) -> None:
        seen = {"loss": loss.item().hex(), "indexes": indexes.tolist()}
        self._append(json.dumps({**self.place, "step": step, "epoch": epoch, **seen}) + "\n")

    def _append(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)


def read_diary(folder: Path, *, epochs: int) -> dict[str, Any]:
    """What counts of the files of all ranks, also of those that later attempts did not have: of
    each step the lines of the last attempt that has trained it."""
    entries = [
        json.loads(line)
        for path in sorted(folder.glob("rank-*.jsonl"))
        for line in path.read_text().splitlines()
        if line.endswith("}")  # whole
    ]
    of_first = [entry for entry in entries if entry["rank"] == 0]
    newest = {entry["step"]: entry["attempt"] for entry in of_first}
    steps: dict[int, list[dict[str, Any]]] = {step: [] for step in sorted(newest)}
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for entry in entries:
        if entry["attempt"] == newest.get(entry["step"]):
            steps[entry["step"]].append(entry)
            seen[entry["epoch"]] += [index for index in entry["indexes"] if index >= 0]
    losses = [[entry["loss"] for entry in ranks] for ranks in steps.values()]
    return {
        "losses": losses,
        "mean_losses": [sum(map(float.fromhex, ranks)) / len(ranks) for ranks in losses],
        "samples": [[entry["indexes"] for entry in ranks] for ranks in steps.values()],
        "steps_missing": sorted({*range(1, max(steps, default=0))} - {*steps}),
        "steps_trained_twice": len(of_first) - len(newest),
        "every_sample_once": [sorted(found) == list(range(IMAGES)) for found in seen.values()],
    }


def parse_arguments(description: str | None) -> argparse.Namespace:
    parser = options(description, batch_size=48, width=64)
    add = parser.add_argument
    add("--directory", type=Path, help="of the run; default in a job: hydroslurm-runs/JOBID")
    add("--every-steps", type=positive, default=200, help="steps between two periodic saves (200)")
    add("--dropout", type=float, default=0.1, help="share of activations that is dropped (0.1)")
    add("--no-batch-norm", dest="batch_norm", action="store_false", help="none in the DDP model")
    add("--fsdp", action="store_true", help="sharded by FSDP2, without batch norm")
    add("--collective-timeout-s", type=float, default=600.0, help="torch's, for each (600)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
