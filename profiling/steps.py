"""The training steps that are measured: a small MLP, and a small transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Training:
    """A model and one whole step of its training: forward, loss, backward, optimizer."""

    model: nn.Module
    step: Callable[[], None]


def mlp() -> Training:
    """Two linear layers: a step of some hundred microseconds, where overhead shows most."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return _training(model, torch.randn(32, 64), torch.randint(0, 10, (32,)))


def transformer() -> Training:
    """Two encoder layers of width 64: a step of some milliseconds."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Linear(16, 64),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Flatten(),
        nn.Linear(32 * 64, 10),
    )
    return _training(model, torch.randn(8, 32, 16), torch.randint(0, 10, (8,)))


def _training(model: nn.Module, data: torch.Tensor, target: torch.Tensor) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(data), target).backward()
        optimizer.step()

    return Training(model, step)
