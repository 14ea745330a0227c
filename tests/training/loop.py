"""A small training with everything that has a state, for tests in this process and in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hydroslurm import Run
from hydroslurm.data import ResumableSampler

SAMPLES, BATCH = 40, 4
STEPS_PER_EPOCH = SAMPLES // BATCH


class Losses:
    """The loss of every step, exact."""

    def __init__(self) -> None:
        self.values: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


class Training:
    """The objects of one attempt, made anew as a new process would make them."""

    def __init__(self, directory: Path, *, width: int = 8, **options: Any) -> None:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,)))
        self.loader = DataLoader(data, batch_size=BATCH, sampler=ResumableSampler(data, seed=1))
        self.model = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.2), nn.Linear(width, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.9)
        self.losses = Losses()
        options = {"loader": self.loader, "every_steps": 4, **options}
        self.run = Run(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            directory=directory,
            extra={"losses": self.losses},
            **options,
        )

    def step(self, batch: Any) -> None:
        self.learn(batch)
        self.scheduler.step()

    def learn(self, batch: Any) -> None:
        x, y = batch
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.losses.values.append(loss.item().hex())

    def train(self, *, epochs: int, stop_after: int | None = None) -> None:
        """Train to the end, or ask for a stop in the step after so many of this attempt."""
        with self.run as run:
            first = run.step
            for batch in run.batches(epochs=epochs):
                self.step(batch)
                if run.step + 1 - first == stop_after:
                    ask_for_stop(run)

    def bits(self) -> tuple[Any, ...]:
        """All that must be the same in the end."""
        moments = [
            value.clone()
            for state in self.optimizer.state_dict()["state"].values()
            for value in state.values()
        ]
        weights = [weight.detach().clone() for weight in self.model.parameters()]
        return weights, moments, self.losses.values, torch.get_rng_state()


def ask_for_stop(run: Run) -> None:
    """As a signal would, and wait until the run has heard of it."""
    from processes import wait_until

    run.request_stop()
    wait_until(lambda: run.stop_requested, "the stop to be heard")


class Pole:
    """An environment: a state that actions change, and wind from a generator of its own."""

    def __init__(self) -> None:
        self.wind, self.place = numpy.random.default_rng(3), 0.0

    def step(self, push: float) -> float:
        self.place += 0.1 * push + float(self.wind.normal(0, 0.1))
        return self.place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
