"""A trainer of one's own: a phase, a configuration that counts, rates by name, class attributes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


@dataclass
class Config:
    scale: float = 1.0
    seen: int = 0


class Best:
    loss, steps = 9.0, 0


class Trainer:
    def __init__(self) -> None:
        self.config, self.phase, self.seen_in = Config(), Phase.WARM, dict.fromkeys(Phase, 0)
        self.model, self.rates = torch.nn.Linear(4, 1), {"weight": 0.1, "bias": 0.2}
        self.optimizer = torch.optim.SGD(
            [{"params": [one], "name": name} for name, one in self.model.named_parameters()], lr=1
        )

    def learn(self, x: torch.Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[group["name"]] * (2 if self.phase is Phase.WARM else 1)
        loss = self.model(x).square().mean() * self.config.scale
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.rates["bias"] *= 0.9
        self.config.seen += len(x)
        self.seen_in[self.phase] += 1
        self.phase = Phase.MAIN if self.config.seen > 8 else Phase.WARM
        Best.loss, Best.steps = min(Best.loss, loss.item()), Best.steps + 1

    def fit(self, loader: DataLoader) -> None:
        with hydroslurm.Run(model=self.model, optimizer=self.optimizer, loader=loader) as run:
            for (x,) in run.batches(epochs=3):
                self.learn(x)
                print("=", self.config, self.seen_in, self.rates, Best.loss, Best.steps)


torch.manual_seed(0)
Trainer().fit(DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True))
