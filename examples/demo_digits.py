"""What the demo's trainings share: the digits that come with scikit-learn, a model, and hashes."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


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


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable[Any]) -> float:
    """The share of images that are recognised."""
    model.eval()
    device = next(model.parameters()).device
    right = total = 0
    for images, labels in loader:
        right += int((model(images.to(device)).argmax(dim=1).cpu() == labels).sum())
        total += len(labels)
    return right / total


def hash_weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def hash_tree(tree: Any) -> str:
    """One hash of all tensors and numbers in a state_dict."""
    digest = hashlib.sha256()

    def walk(node: Any) -> None:
        if isinstance(node, torch.Tensor):
            digest.update(str((node.dtype, tuple(node.shape))).encode())
            digest.update(node.detach().cpu().contiguous().numpy().tobytes())
        elif isinstance(node, dict):
            for key in sorted(node, key=str):
                digest.update(str(key).encode())
                walk(node[key])
        elif isinstance(node, (list, tuple)):
            for item in node:
                walk(item)
        else:
            digest.update(repr(node).encode())

    walk(tree)
    return digest.hexdigest()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def options(description: str | None, *, batch_size: int, width: int) -> argparse.ArgumentParser:
    """The options of all trainings, with these defaults; each adds its own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=positive, default=30, help="passes over the training images (30)")
    add("--batch-size", type=positive, default=batch_size, help="images per step, of all ranks")
    add("--workers", type=int, default=1, help="processes of each rank that load the data (1)")
    add("--lr", type=float, default=2e-3, help="highest learning rate (0.002)")
    add("--width", type=positive, default=width, help="channels of the first, or hidden, layers")
    add("--seed", type=int, default=0, help="of all that is random (0)")
    add("--log-every", type=positive, default=50, help="steps between two lines (50)")
    add("--think-s", type=float, default=0.0, help="wait so long in each step, to last longer (0)")
    add("--out", type=Path, help="write what came of it into this JSON file")
    return parser
