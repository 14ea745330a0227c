"""The position in a loader that knows nothing of positions: begin the epoch again, and skip."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from hydroslurm.checkpoint import rng
from hydroslurm.data import epochs
from hydroslurm.data.epochs import CountedBatches, LaterBatches, Progress
from hydroslurm.data.share import Share, world_size_now
from hydroslurm.errors import StateMismatch
from hydroslurm.runtime.workers import iterate


class ReplayPosition:
    """Keeps what the random generators were when the epoch began, and fetches its batches again.

    Exact for all that follows from those generators, augmentation in workers too: they are
    started anew in every epoch, also persistent ones, because their random numbers would else
    depend on all epochs before. The data itself must come in the same order again.
    """

    name = "replay"

    def __init__(
        self, loader: Any, *, shield: Collection[int] = (), share: Share | None = None
    ) -> None:
        self._loader = loader
        self._share = share
        self._shield = frozenset(shield)
        self._progress = Progress()
        self._start_rng: Mapping[str, Any] = {}
        self._start_generators: Mapping[str, torch.Tensor] = {}

    def begin_epoch(self, epoch: int) -> Iterator[Any]:
        self._start_rng = rng.capture()
        self._start_generators = epochs.generator_states(self._loader)
        self._progress = Progress(epoch, begun=True, world_size=world_size_now(self._share))
        return CountedBatches(self._iterate(epoch), self._progress)

    def resume_epoch(self, state: Mapping[str, Any]) -> Iterator[Any]:
        progress = Progress.of(state, strategy=self.name)
        progress.require_world(world_size_now(self._share))
        self._progress = progress
        if not progress.begun:
            epochs.set_generator_states(self._loader, state["generators"])
            return LaterBatches(lambda: self.begin_epoch(progress.epoch))
        self._start_rng = state["start_rng"]
        self._start_generators = state["start_generators"]
        if progress.finished:
            batches: Iterator[Any] = iter(())
        else:
            rng.restore(self._start_rng)
            epochs.set_generator_states(self._loader, self._start_generators)
            batches = self._iterate(progress.epoch)
            _skip(batches, progress.batches)
        epochs.set_generator_states(self._loader, state["generators"])
        return CountedBatches(batches, progress)

    def state_dict(self) -> dict[str, Any]:
        state = self._progress.state_dict(self.name)
        state["generators"] = epochs.generator_states(self._loader)
        if self._progress.begun:
            state["start_rng"] = self._start_rng
            state["start_generators"] = self._start_generators
        return state

    def _iterate(self, epoch: int) -> Iterator[Any]:
        epochs.forget_iterator(self._loader)
        epochs.announce(self._loader, epoch)
        return iterate(self._loader, shield=self._shield)


def _skip(batches: Iterator[Any], count: int) -> None:
    if count:
        warnings.warn(
            f"resuming inside an epoch: {count} batches are fetched again and thrown away, "
            "because this loader cannot be told where to begin. A DataLoader with "
            "sampler=hydroslurm.data.ResumableSampler(dataset), or torchdata's "
            "StatefulDataLoader, resumes at once",
            stacklevel=3,
        )
    for done in range(count):
        try:
            next(batches)
        except StopIteration:
            raise StateMismatch(
                f"{count} batches of the epoch had been used, but the loader ended after {done}; "
                "its data or its batch size is not what it was"
            ) from None
