"""The position in a plain DataLoader over a ResumableSampler: computed, so nothing is replayed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from hydroslurm.data import epochs
from hydroslurm.data.caveat import warn_of_unseeded_workers
from hydroslurm.data.epochs import CountedBatches, LaterBatches, Progress
from hydroslurm.data.generators import generator_states, set_generator_states
from hydroslurm.data.sampler import ResumableSampler
from hydroslurm.data.share import Share
from hydroslurm.runtime.workers import iterate


@dataclass(frozen=True)
class IndexPlan:
    """How a loader makes batches of a sampler's indexes; ``batch_size`` in samples of this rank."""

    sampler: ResumableSampler
    batch_size: int


def index_plan(loader: Any) -> IndexPlan | None:
    """The plan of a plain DataLoader over a :class:`ResumableSampler`; None for all others.

    Also None for a batch sampler with an ``__iter__`` of its own: how many samples its batches
    took cannot be computed.
    """
    if not isinstance(loader, DataLoader):
        return None
    indexes = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if isinstance(indexes, ResumableSampler):
        return IndexPlan(indexes, 1)
    if (
        isinstance(indexes, BatchSampler)
        and type(indexes).__iter__ is BatchSampler.__iter__
        and isinstance(indexes.sampler, ResumableSampler)
    ):
        return IndexPlan(indexes.sampler, indexes.batch_size)
    return None


class SamplerPosition:
    """Counts the batches that were handed out, and computes the samples from that."""

    name = "sampler"

    def __init__(
        self,
        loader: Any,
        plan: IndexPlan,
        *,
        shield: Collection[int] = (),
        share: Share | None = None,
    ) -> None:
        self._loader = loader
        self._plan = plan
        self._share = share
        self._shield = frozenset(shield)
        self._progress = Progress()
        self._resumed_batches = 0
        self._resumed_consumed = 0
        self._samples_per_batch = 0
        self._warned = False

    def begin_epoch(self, epoch: int) -> Iterator[Any]:
        epochs.announce(self._loader, epoch)
        self._progress = Progress(epoch, begun=True)
        self._resumed_batches = self._resumed_consumed = 0
        self._settle_share()
        return CountedBatches(self._iterate(), self._progress)

    def resume_epoch(self, state: Mapping[str, Any]) -> Iterator[Any]:
        progress = Progress.of(state, strategy=self.name)
        self._progress = progress
        if not progress.begun:
            set_generator_states(self._loader, state["generators"])
            return LaterBatches(lambda: self.begin_epoch(progress.epoch))
        epochs.announce(self._loader, progress.epoch)
        self._resumed_batches = progress.batches
        self._resumed_consumed = int(state["sampler"]["consumed"])
        self._settle_share()
        # At the end of an epoch there is nothing to iterate, and who goes over the loader by
        # himself sees the whole epoch, as in an uninterrupted run. Persistent workers are started
        # all the same: there they are when the next epoch begins, which then draws no base seed.
        if progress.finished and not self._loader.persistent_workers:
            batches: Iterator[Any] = iter(())
        else:
            self._plan.sampler.load_state_dict(state["sampler"])
            batches = self._iterate()
        set_generator_states(self._loader, state["generators"])
        return CountedBatches(iter(()) if progress.finished else batches, progress)

    def state_dict(self) -> dict[str, Any]:
        state = self._progress.state_dict(self.name)
        state["sampler"] = self._plan.sampler.state_at(self._progress.epoch, self._consumed())
        state["generators"] = generator_states(self._loader)
        return state

    def _consumed(self) -> int:
        batches = self._progress.batches - self._resumed_batches
        return self._resumed_consumed + batches * self._samples_per_batch

    def _settle_share(self) -> None:
        """Fix for this epoch what a batch takes from the order: at its end the process group, which
        the sampler may follow, can be gone before the last save."""
        share = self._plan.sampler.share
        self._progress.world_size = (self._share or share).world_size
        self._samples_per_batch = self._plan.batch_size * share.world_size

    def _iterate(self) -> Iterator[Any]:
        if not self._warned:
            self._warned = True
            warn_of_unseeded_workers(self._loader)
        return iterate(self._loader, shield=self._shield)
