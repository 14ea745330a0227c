"""A training-like loop that stops, and goes on in a new graph of objects, as a new process would.

Written in the order that the session uses: begin or resume the epoch, restore the global RNG,
then the batches. Each attempt begins with other seeds, so that whatever is right was restored.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from checkpoint.states import same
from torch.utils.data import Dataset, IterableDataset

from hydroslurm.checkpoint import rng
from hydroslurm.data import position_of

SAMPLES, BATCH, EPOCHS = 22, 4, 3
STEPS = 6  # in an epoch; the last batch is a short one

# before anything; before the first batch; twice in one epoch; after the last batch, before and
# after the loop has heard that there are no more; at the very end
STOPS = (
    "unbegun",
    "begun 0",
    "step 2",
    "step 3",
    "step 6",
    "end 0",
    "begun 1",
    "step 7",
    "end 1",
    "step 15",
    "step 18",
    "end 2",
)


class Augmented(Dataset[torch.Tensor]):
    """Its samples depend on all three global generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [random.random(), numpy.random.rand(), torch.rand((), dtype=torch.float64).item()]
        return torch.tensor([index, *noise], dtype=torch.float64)


class AugmentedStream(IterableDataset[torch.Tensor]):
    """The same without indexes."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Augmented()[index] for index in range(SAMPLES))


class CountedStream(IterableDataset[torch.Tensor]):
    """A stream that knows where it is, for StatefulDataLoader; worker w has every n-th sample."""

    def __init__(self) -> None:
        self.at = 0
        self.resumed_at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        # here, and not in the generator: a state may be asked for before the first sample
        self.at, self.resumed_at = self.resumed_at, 0
        return self._rows()

    def _rows(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        while first + self.at * step < SAMPLES:
            self.at += 1
            yield torch.tensor(first + (self.at - 1) * step)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resumed_at = state["at"]


class Stop(Exception):
    """The moment at which this attempt ends."""


class Attempt:
    """One process's worth of training."""

    def __init__(self, make: Callable[[], Any], number: int, stop: str | None) -> None:
        random.seed(number)
        numpy.random.seed(number)
        torch.manual_seed(number)
        self.position = position_of(make())
        self.stop = stop
        self.log: list[Any] = []
        self.steps = 0
        self.saved = b""

    def train(self, saved: bytes) -> None:
        """Run until the stop or the end; ``saved`` is what the attempt before has left."""
        first, batches = 0, None
        if saved:
            state = torch.load(io.BytesIO(saved), weights_only=True)  # nothing is unpickled
            self.steps, first = state["steps"], state["data"]["epoch"]
            batches = self.position.resume_epoch(state["data"])
            rng.restore(state["rng"])
        self.at("unbegun")
        for epoch in range(first, EPOCHS):
            if batches is None:
                batches = self.position.begin_epoch(epoch)
            self.at(f"begun {epoch}")
            for batch in batches:
                self.step(batch)
            self.at(f"end {epoch}")
            batches = None

    def step(self, batch: Any) -> None:
        dropout = torch.nn.functional.dropout(torch.ones(4))
        halves = random.gauss(0, 1), numpy.random.standard_normal()  # each keeps one for later
        self.log.append((batch, dropout, random.random(), numpy.random.rand(), *halves))
        self.steps += 1
        self.at(f"step {self.steps}")

    def at(self, moment: str) -> None:
        if moment == self.stop:
            self.saved = self.save()
            raise Stop

    def save(self) -> bytes:
        into = io.BytesIO()
        state = {"data": self.position.state_dict(), "rng": rng.capture(), "steps": self.steps}
        torch.save(state, into)
        return into.getvalue()


def run(make: Callable[[], Any], *stops: str) -> tuple[list[Any], bytes]:
    """Train in as many attempts as there are stops, plus one.

    Returns what each step saw, and the state at the end, RNG included.
    """
    log, saved = [], b""
    for number, stop in enumerate((*stops, None)):
        attempt = Attempt(make, number, stop)
        try:
            attempt.train(saved)
        except Stop:
            saved = attempt.saved
        else:
            assert stop is None, f"this attempt never came to {stop!r}"
        log += attempt.log
    return log, attempt.save()


def assert_same(expected: tuple[list[Any], bytes], found: tuple[list[Any], bytes]) -> None:
    """What two runs returned: the same at each step and at the end."""
    for number, (a, b) in enumerate(zip(expected[0], found[0], strict=False), 1):
        assert same(a, b), f"step {number} differs: {a} without a stop, {b} with stops"
    assert len(found[0]) == len(expected[0])
    ends = [torch.load(io.BytesIO(end), weights_only=True)["rng"] for _, end in (expected, found)]
    assert same(*ends), "the global generators differ at the end"


def samples(log: list[Any]) -> list[int]:
    """The indexes of the samples, in the order in which the steps saw them."""
    return [int(row) for batch, *_ in log for row in batch.reshape(-1, 4)[:, 0]]
