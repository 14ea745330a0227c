"""The training that stock_submitit.py has preempted, in the ways that it compares.

The stock one is what submitit's docs/checkpointing.md asks for: a callable with a ``checkpoint``
method, which saves and returns a fresh callable. It saves all that one can think of (model,
optimizer, scheduler, position in the epoch, random numbers), into a file that is replaced in one
step.
"""

from __future__ import annotations

import contextlib
import itertools
from contextlib import AbstractContextManager
from typing import Any

import submitit
from digits import BATCH_SIZE, SEED, Config, Parts, outcome
from progress import Progress
from torch.utils.data import DataLoader


class StockTraining(submitit.helpers.Checkpointable):
    """As the docs say: saves when submitit asks for a checkpoint; and after every epoch.

    In the rank ``checkpoint`` runs inside a signal handler, wherever the training is.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.parts: Parts | None = None
        self.step = 0

    def __call__(self) -> dict[str, Any]:
        self.parts = parts = Parts(self.config)
        self.step = parts.load(self.config.folder / "checkpoint.pt")
        with self.observed() as progress:
            for epoch in range(self.step // parts.steps_per_epoch, self.config.epochs):
                done = self.step % parts.steps_per_epoch
                for batch in itertools.islice(parts.loader(epoch), done, None):
                    parts.learn(batch)
                    self.step += 1
                    progress.made(self.step)
                self.save()
        return outcome(parts, self.step)

    def observed(self) -> AbstractContextManager[Progress]:
        """What is told of each step."""
        return contextlib.nullcontext(Progress(self.config.folder / "progress", self.step))

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        if self.parts is not None:
            self.save()
        return submitit.helpers.DelayedSubmission(type(self)(self.config))

    def save(self) -> None:
        assert self.parts is not None
        self.parts.save(self.config.folder / "checkpoint.pt", self.step)


def run_training(config: Config) -> dict[str, Any]:
    """The same with ``hydroslurm.Run``, which saves once per epoch too."""
    import hydroslurm
    from hydroslurm.data import ResumableSampler

    parts = Parts(config)
    sampler = ResumableSampler(parts.data, seed=SEED)
    with hydroslurm.Run(
        model=parts.model,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        loader=DataLoader(parts.data, batch_size=BATCH_SIZE, sampler=sampler),
        directory=config.folder / "run",
        every_steps=parts.steps_per_epoch,
    ) as run:
        run.resume()
        progress = Progress(config.folder / "progress", run.step)
        for batch in run.batches(epochs=config.epochs):
            parts.learn(batch)
            progress.made(run.step + 1)
        return outcome(parts, run.step)
