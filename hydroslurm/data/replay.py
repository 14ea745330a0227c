"""The position in a loader that knows nothing of positions: begin the epoch again, and skip."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hydroslurm.checkpoint import rng
from hydroslurm.data import epochs
from hydroslurm.data.epochs import CountedBatches, LaterBatches, Progress
from hydroslurm.data.generators import generator_states, set_generator_states
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
        self._start_generators: Mapping[str, Any] = {}

    def begin_epoch(self, epoch: int) -> Iterator[Any]:
        self._start_rng = rng.capture()
        self._start_generators = generator_states(self._loader)
        self._progress = Progress(epoch, begun=True, world_size=world_size_now(self._share))
        return CountedBatches(self._iterate(epoch), self._progress)

    def resume_epoch(self, state: Mapping[str, Any]) -> Iterator[Any]:
        progress = Progress.of(state, strategy=self.name)
        progress.require_world(world_size_now(self._share))
        self._progress = progress
        if not progress.begun:
            set_generator_states(self._loader, state["generators"])
            return LaterBatches(lambda: self.begin_epoch(progress.epoch))
        self._start_rng = state["start_rng"]
        self._start_generators = state["start_generators"]
        if progress.finished:
            batches: Iterator[Any] = iter(())
        else:
            rng.restore(self._start_rng)
            set_generator_states(self._loader, self._start_generators)
            batches = self._iterate(progress.epoch)
            _skip(batches, progress.batches, unknown=_unknown_sampler(self._loader))
        set_generator_states(self._loader, state["generators"])
        return CountedBatches(batches, progress)

    def state_dict(self) -> dict[str, Any]:
        state = self._progress.state_dict(self.name)
        state["generators"] = generator_states(self._loader)
        if self._progress.begun:
            state["start_rng"] = self._start_rng
            state["start_generators"] = self._start_generators
        return state

    def _iterate(self, epoch: int) -> Iterator[Any]:
        epochs.forget_iterator(self._loader)
        epochs.announce(self._loader, epoch)
        return iterate(self._loader, shield=self._shield)


def _unknown_sampler(loader: Any) -> str | None:
    """The class of a sampler of somebody's own, whose random numbers may lie anywhere."""
    names = [type(one).__name__ for one in epochs.samplers(loader) if not _is_known(type(one))]
    return names[0] if names else None


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "hydroslurm")


def _skip(batches: Iterator[Any], count: int, *, unknown: str | None) -> None:
    if count:
        order = (
            f". {unknown} has to give the same order again, from the global random numbers or "
            "generators that are its attributes: those are put back. If it draws from anything "
            "else, some samples come twice in this epoch and others never"
        )
        warnings.warn(
            f"resuming inside an epoch: {count} batches are fetched again and thrown away, "
            "because this loader cannot be told where to begin. A DataLoader with "
            "sampler=hydroslurm.data.ResumableSampler(dataset), or torchdata's "
            f"StatefulDataLoader, resumes at once{order if unknown else ''}",
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
