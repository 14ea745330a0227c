"""The position in a loader that keeps it itself: torchdata's StatefulDataLoader, or one like it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hydroslurm.data import epochs
from hydroslurm.data.caveat import warn_of_samplers_begun_anew, warn_of_unseeded_workers
from hydroslurm.data.epochs import CountedBatches, LaterBatches, Progress
from hydroslurm.data.generators import generator_states, set_generator_states
from hydroslurm.data.share import Share, world_size_now
from hydroslurm.errors import StateMismatch
from hydroslurm.runtime.workers import iterate

# set by torchdata once its iterator has raised StopIteration
_FINISHED = "_iterator_finished"


class StatefulPosition:
    """Keeps the loader's own state, which counts batches yielded, not batches prefetched."""

    name = "stateful"

    def __init__(
        self, loader: Any, *, shield: Collection[int] = (), share: Share | None = None
    ) -> None:
        self._loader = loader
        self._share = share
        self._shield = frozenset(shield)
        self._progress = Progress()
        self._warned = False

    def begin_epoch(self, epoch: int) -> Iterator[Any]:
        self._warn()
        epochs.announce(self._loader, epoch)
        self._progress = Progress(epoch, begun=True, world_size=world_size_now(self._share))
        return CountedBatches(iterate(self._loader, shield=self._shield), self._progress)

    def resume_epoch(self, state: Mapping[str, Any]) -> Iterator[Any]:
        progress = Progress.of(state, strategy=self.name)
        world_size = world_size_now(self._share)
        progress.require_world(world_size)
        now = getattr(self._loader, "num_workers", 0)
        if progress.finished and (progress.world_size, state["num_workers"]) != (world_size, now):
            self._progress = progress
            set_generator_states(self._loader, state["generators"])
            return iter(())  # the loader's own state is about lengths that it has no more
        self._require_workers(state)
        if not progress.begun:
            self._progress = progress
            set_generator_states(self._loader, state["generators"])
            return LaterBatches(lambda: self.begin_epoch(progress.epoch))
        self._warn()
        epochs.announce(self._loader, progress.epoch)
        own = dict(state["loader"])
        torchdata = _FINISHED in own
        if torchdata:
            # With this flag set it would go on to the *next* epoch at once, and draw for it at
            # the wrong time. Without it, the iterator is simply at the end of this one.
            own[_FINISHED] = False
        self._loader.load_state_dict(own)
        self._progress = progress
        if progress.finished and not torchdata:
            return iter(())
        batches = iterate(self._loader, shield=self._shield)
        # torchdata's RandomSampler winds the generator back to the start of the epoch, and so
        # loses what the loader has drawn from the same generator since (its base seed)
        set_generator_states(self._loader, state["generators"])
        return CountedBatches(batches, self._progress)

    def state_dict(self) -> dict[str, Any]:
        state = self._progress.state_dict(self.name)
        state["num_workers"] = getattr(self._loader, "num_workers", 0)
        state["generators"] = generator_states(self._loader)
        if self._progress.begun:  # before that, asking would start the workers
            state["loader"] = epochs.plain(self._loader.state_dict(), place="loader.state_dict()")
        return state

    def _require_workers(self, state: Mapping[str, Any]) -> None:
        now = getattr(self._loader, "num_workers", 0)
        if state["num_workers"] != now and state["begun"]:
            raise StateMismatch(
                f"the saved position is of a loader with num_workers={state['num_workers']}, now "
                f"it has {now}; StatefulDataLoader cannot change that inside an epoch (a plain "
                "DataLoader with hydroslurm's ResumableSampler can)"
            )

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warn_of_unseeded_workers(self._loader)
            warn_of_samplers_begun_anew(self._loader)
