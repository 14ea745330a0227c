"""Train a small CNN on real images: the 1,797 handwritten digits that come with scikit-learn.

    python examples/train.py                                    # a plain PyTorch script
    python examples/train.py --pausable                         # pausable by its pid: one line more
    hydroslurm submit --partition low examples/train.py         # pausable, without that line

Pause it while it trains (hydroslurm pause --pid PID), look at the processor's load, and resume it
(hydroslurm resume --pid PID). The hash of the final weights is the same with and without pauses.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    args = parse_arguments()
    make_deterministic(args.seed)
    train_loader, test_loader = load_data(batch_size=args.batch_size, seed=args.seed)
    model = make_model(width=args.width).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    if args.pausable:
        import hydroslurm

        model = hydroslurm.od_execution_wrapper(model)  # <- the one line; harmless when repeated
        print(f"pausable: hydroslurm pause --pid {os.getpid()}", flush=True)

    steps = 1 if args.dry_run else args.iterations or args.epochs * len(train_loader)
    print(f"training for {steps} steps on {args.device}", flush=True)
    begin = time.perf_counter()
    loss = train(model, optimizer, train_loader, steps=steps, log_every=args.log_every)
    seconds = time.perf_counter() - begin

    accuracy = evaluate(model, test_loader)
    digest = hash_weights(model)
    print(f"accuracy {accuracy:.2%} on {len(test_loader.dataset)} test images", flush=True)
    print(f"weights  sha256 {digest}", flush=True)
    if args.out is not None:
        result = {"accuracy": accuracy, "final_loss": loss, "weights_sha256": digest}
        args.out.write_text(json.dumps({**result, "steps": steps, "seconds": seconds}) + "\n")


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[torch.Tensor, ...]],
    *,
    steps: int,
    log_every: int,
) -> float:
    """The usual loop, with nothing in it for hydroslurm; returns the last loss."""
    model.train()
    device = next(model.parameters()).device
    last_loss, last_step, last_time = float("nan"), 0, time.perf_counter()
    for step, (images, labels) in enumerate(batches(loader, steps=steps), start=1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        if step % log_every == 0 or step == steps:
            last_loss, now = loss.item(), time.perf_counter()
            rate = (step - last_step) / (now - last_time)  # a pause shows as a slow line
            print(f"step {step:5d}/{steps}  loss {last_loss:.4f}  {rate:6.1f} steps/s", flush=True)
            last_step, last_time = step, now
    return last_loss


def batches(
    loader: DataLoader[tuple[torch.Tensor, ...]], *, steps: int
) -> Iterator[tuple[torch.Tensor, ...]]:
    """As many batches as asked for, over as many epochs as that takes."""
    done = 0
    while True:
        for batch in loader:
            if done == steps:
                return
            yield batch
            done += 1


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable[tuple[torch.Tensor, ...]]) -> float:
    """The share of images that are recognised."""
    model.eval()
    device = next(model.parameters()).device
    right = total = 0
    for images, labels in loader:
        right += int((model(images.to(device)).argmax(dim=1).cpu() == labels).sum())
        total += len(labels)
    return right / total


def load_data(
    *, batch_size: int, seed: int
) -> tuple[DataLoader[tuple[torch.Tensor, ...]], DataLoader[tuple[torch.Tensor, ...]]]:
    """Images of 8 x 8 pixels, four fifths to train with and one fifth to test with."""
    train_x, train_y, test_x, test_y = digits_tensors(seed=seed)
    order = torch.Generator().manual_seed(seed)
    train_loader = DataLoader(
        TensorDataset(train_x, train_y), batch_size=batch_size, shuffle=True, generator=order
    )
    return train_loader, DataLoader(TensorDataset(test_x, test_y), batch_size=512)


def digits_tensors(*, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(train images, train labels, test images, test labels); images are [n, 1, 8, 8], 0 to 1."""
    table = torch.from_numpy(np.loadtxt(digits_file(), delimiter=",", dtype=np.float32))
    images, labels = table[:, :-1].reshape(-1, 1, 8, 8) / 16, table[:, -1].long()
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    fifth = -(-len(order) // 5)
    test, train = order[:fifth], order[fifth:]
    return images[train], labels[train], images[test], labels[test]


def digits_file() -> Path:
    """Where scikit-learn has them. It is not imported: that would take longer than all the rest."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise SystemExit("the digits come with scikit-learn, which is not here: pip install it")
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"


def make_model(*, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def make_deterministic(seed: int) -> None:
    """The same seed gives the same bits: the order of additions must not depend on threads."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)


def hash_weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--batch-size", type=positive, default=64, help="images per step (64)")
    add("--epochs", type=positive, default=100, help="passes over the training images (100)")
    add("--iterations", type=positive, help="train so many steps, instead of --epochs")
    add("--lr", type=float, default=0.05, help="learning rate (0.05)")
    add("--width", type=positive, default=24, help="channels of the first layer (24)")
    add("--device", default="cpu", help="cpu or cuda (cpu)")
    add("--seed", type=int, default=0, help="of weights, order and split (0)")
    add("--log-every", type=positive, default=50, help="steps between two lines (50)")
    add("--dry-run", action="store_true", help="one step and the test, to see that all works")
    add("--pausable", action="store_true", help="call hydroslurm.od_execution_wrapper(model)")
    add("--out", type=Path, help="write accuracy, loss and the weights' hash into this JSON file")
    return parser.parse_args()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


if __name__ == "__main__":
    main()
