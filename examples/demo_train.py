"""The training of the demo's second act: `hydroslurm.Run`, and a record of all that it computes.

    python examples/demo_train.py --directory runs/digits

Stop it with SIGTERM and start it again, as often as you like: the loss of every step, the final
weights and the optimizer's state are bit for bit those of an uninterrupted run. train_run.py is
the same training without the record.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from demo_digits import (
    digits_tensors,
    evaluate,
    hash_tree,
    hash_weights,
    make_deterministic,
    make_model,
    options,
    positive,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hydroslurm
from hydroslurm.data import ResumableSampler, SeededDataset


def main() -> None:
    args = parse_arguments()
    make_deterministic(args.seed)
    train_x, train_y, test_x, test_y = digits_tensors(seed=args.seed)
    data = SeededDataset(ShiftedDigits(train_x, train_y), seed=args.seed)
    sampler = ResumableSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers)
    model = nn.Sequential(nn.Dropout(0.1), *make_model(width=args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=args.epochs * len(loader)
    )
    diary = Diary()

    with hydroslurm.Run(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        directory=args.directory,
        every_steps=args.every_steps,
        extra={"diary": diary},
    ) as run:
        run.resume()
        for images, labels, indexes in run.batches(epochs=args.epochs):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            diary.write(run.epoch, loss, indexes)
            time.sleep(args.think_s)
            if run.step % args.log_every == 0:
                print(f"epoch {run.epoch} step {run.step} loss {loss.item():.4f}", flush=True)

        test = DataLoader(torch.utils.data.TensorDataset(test_x, test_y), batch_size=512)
        with run.evaluation():  # a stop cuts it off; the next attempt restarts it
            accuracy = evaluate(model, asking(run, test))
        print(f"accuracy {accuracy:.2%} on {len(test_y)} test images", flush=True)
        print(f"weights  sha256 {hash_weights(model)}", flush=True)
        if args.out is not None:
            result = {
                "steps": run.step,
                "accuracy": accuracy,
                "weights_sha256": hash_weights(model),
                "optimizer_sha256": hash_tree(optimizer.state_dict()),
                "losses_sha256": hashlib.sha256(json.dumps(diary.losses).encode()).hexdigest(),
                "losses": len(diary.losses),
                "every_sample_once": diary.every_sample_once(len(train_y), epochs=args.epochs),
            }
            args.out.write_text(json.dumps(result) + "\n")


def asking(run: hydroslurm.Run, batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches; a stop does not wait for the last of them."""
    for batch in batches:
        run.check_stop()
        yield batch


class ShiftedDigits(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Digits moved by a random pixel: augmentation, so that the random numbers of workers count."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        shift = tuple(torch.randint(-1, 2, (2,)).tolist())
        return torch.roll(self.images[index], shift, dims=(1, 2)), self.labels[index], int(index)


class Diary:
    """The loss of every step, exact, and which samples each epoch has seen: saved with the rest."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.seen: dict[int, list[int]] = {}

    def write(self, epoch: int, loss: torch.Tensor, indexes: torch.Tensor) -> None:
        self.losses.append(loss.item().hex())
        self.seen.setdefault(epoch, []).extend(indexes.tolist())

    def every_sample_once(self, n: int, *, epochs: int) -> bool:
        return sorted(self.seen) == list(range(epochs)) and all(
            sorted(seen) == list(range(n)) for seen in self.seen.values()
        )

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.seen = list(state["losses"]), dict(state["seen"])


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, batch_size=64, width=24)
    add = parser.add_argument
    add("--directory", type=Path, help="of the run; default in a job: hydroslurm-runs/JOBID")
    add("--every-steps", type=positive, default=200, help="steps between two periodic saves (200)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
