"""Where a training loop is in its data, in the middle of an epoch, with workers.

Three strategies behind one interface; :func:`position_of` chooses:

=========== ====================================== ===========================================
name        for                                    a resume costs
=========== ====================================== ===========================================
"stateful"  a loader with state_dict and           nothing (torchdata's StatefulDataLoader)
            load_state_dict
"sampler"   a plain DataLoader whose sampler is a  nothing: the order is computed, not replayed
            :class:`ResumableSampler`
"replay"    anything else that can be iterated     the batches of the epoch so far once more
=========== ====================================== ===========================================

Bit for bit: the batches after a resume are those of an uninterrupted run. Random augmentation:
without workers always (it draws from the global generators, which the session restores after the
iterator exists); with workers by "replay" always, by the other two if the data set is a
:class:`~hydroslurm.data.seeding.SeededDataset` (workers start anew there). Not covered: a loader
whose choice *which* samples come draws from the global generators between batches.

Several ranks: each has a position of its own. A "sampler" position is the same on all of them,
because it counts the samples that all have consumed: any number of ranks can go on from any one of
them, each to its new share of what is left, with batches of another size if that keeps the global
batch. So can a "replay" position of torch's DistributedSampler and of what accelerate has prepared
(:class:`~hydroslurm.data.sampler.SharedOrder`). The others can be resumed inside an epoch by the
same rank of the same number only. A rank that had no part in the save takes rank 0's position,
generators included.

Making an iterator draws: DataLoader takes a base seed for its workers from ``loader.generator``, or
else from torch's global generator (persistent workers: once, not in each epoch), RandomSampler a
seed or a permutation from its own, or else from the global one, when its first batch is asked for.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DataLoader

from hydroslurm.checkpoint import rng
from hydroslurm.data import epochs
from hydroslurm.data.epochs import (
    CountedBatches,
    Progress,
    later_batches,
    warn_of_samplers_begun_anew,
    warn_of_unseeded_workers,
)
from hydroslurm.data.global_batches import GlobalBatchSampler
from hydroslurm.data.loader_state import LoaderState, PersistentWorkers, keeps_workers
from hydroslurm.data.sampler import (
    ResumableSampler,
    Share,
    loader_of,
    share_given,
    share_now,
    shared_order,
)
from hydroslurm.errors import StateMismatch, UsageError

# set by torchdata once its iterator has raised StopIteration
_FINISHED = "_iterator_finished"


class LoaderPosition(Protocol):
    """The position of one training loop in one loader."""

    name: str
    loader_state: LoaderState
    """What changes in the loader beside."""

    def begin_epoch(self, epoch: int) -> Iterator[Any]:
        """Start an epoch; tells the samplers and the data set which one it is."""

    def resume_epoch(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """Go on after the last batch that was handed out. The caller restores the global RNG
        *after* this and before the first ``next()``.

        A state from before the first epoch gives an iterator that begins the epoch with its first
        ``next()``; one from after an epoch's last batch gives an iterator that is at its end.

        Raises:
            StateMismatch: the loader is not built as it was, or an epoch that another number of
            ranks had begun can be resumed by that number only.
        """

    def batches_of_epoch(self, state: Mapping[str, Any]) -> int | None:
        """How many batches the epoch has that this state lies in: those that were used and those
        that are left for this number of ranks. None: as many as any other epoch."""

    def without_newest(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state of before the last batch was handed out, for another number of ranks: none of
        them has used it."""

    def left_behind(self) -> Mapping[str, Any] | None:
        """Between two epochs: the end of the last one, to be resumed before the next one begins,
        where workers go on with what they have."""

    def state_dict(self) -> dict[str, Any]:
        """The position between two batches: each batch that was handed out counts as used.
        Plain values and tensors only; ``epoch``, ``batches`` and ``world_size`` are in it."""


def position_of(
    loader: Any,
    *,
    rank: int | None = None,
    world_size: int | None = None,
) -> LoaderPosition:
    """The cheapest exact way to hold a position in this loader.

    Args:
        rank, world_size: of the loop; default: torch.distributed's where that is initialised when
            an epoch begins. A ResumableSampler that was given a rank keeps it; one that was not
            takes this one where torch.distributed is not initialised.

    Raises:
        UsageError: the loader hands out batches in the order in which workers finish
            (``in_order=False``), so that nobody can say which ones were used; or it cannot be
            iterated; or only one of ``rank`` and ``world_size`` was given.
    """
    share = share_given(rank, world_size)
    if share is not None:
        epochs.tell(loader, share)
    if not hasattr(loader, "__iter__"):
        raise UsageError(f"a loader that can be iterated is wanted, not {type(loader).__name__}")
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        raise UsageError(
            "a DataLoader with in_order=False gives batches as workers finish them, which differs "
            "from run to run and cannot be resumed; leave in_order at True"
        )
    if all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")):
        return StatefulPosition(loader, share=share)
    if (indexes := countable(loader)) is not None:
        return SamplerPosition(loader, indexes, share=share)
    return ReplayPosition(loader, share=share)


class StatefulPosition:
    """The position in a loader that keeps it itself, such as torchdata's StatefulDataLoader.

    Saves the loader's own state, which counts batches yielded, not batches prefetched.
    """

    name = "stateful"

    def __init__(self, loader: Any, *, share: Share | None = None) -> None:
        self._loader = loader
        self.loader_state = LoaderState(loader)
        self._share = share
        self._progress = Progress()
        self._warned = False

    def begin_epoch(self, epoch: int) -> Iterator[Any]:
        self._warn()
        epochs.announce(self._loader, epoch)
        self._progress = Progress(epoch, begun=True, world_size=share_now(self._share).world_size)
        return CountedBatches(iter(self._loader), self._progress)

    def resume_epoch(self, state: Mapping[str, Any]) -> Iterator[Any]:
        progress = Progress.of(state, strategy=self.name)
        world_size = share_now(self._share).world_size
        progress.require_world(world_size)
        now = getattr(self._loader, "num_workers", 0)
        if progress.finished and (progress.world_size, state["num_workers"]) != (world_size, now):
            self._progress = progress
            self.loader_state.put(state["objects"])
            return iter(())  # the loader's own state is about lengths that it has no more
        self._require_workers(state)
        if not progress.begun:
            self._progress = progress
            self.loader_state.put(state["objects"])
            return later_batches(lambda: self.begin_epoch(progress.epoch))
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
        batches = iter(self._loader)
        # torchdata's RandomSampler winds the generator back to the start of the epoch, and so
        # loses what the loader has drawn from the same generator since (its base seed)
        self.loader_state.put(state["objects"])
        return CountedBatches(batches, self._progress)

    def batches_of_epoch(self, state: Mapping[str, Any]) -> int | None:
        del state  # another number of ranks is refused
        return None

    def without_newest(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return state

    def left_behind(self) -> Mapping[str, Any] | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        state = self._progress.state_dict(self.name)
        state["num_workers"] = getattr(self._loader, "num_workers", 0)
        state["objects"] = self.loader_state.now()
        if self._progress.begun:  # before that, asking would start the workers
            state["loader"] = epochs.copied_state(self._loader)
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


def countable(loader: Any) -> Any | None:
    """What makes the indexes of a plain DataLoader over a :class:`ResumableSampler`; None for all
    others.

    Also None for a batch sampler with an ``__iter__`` of its own: how many samples its batches
    took cannot be computed.
    """
    if not isinstance(loader, DataLoader):
        return None
    indexes: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if isinstance(indexes, (ResumableSampler, GlobalBatchSampler)):
        return indexes
    is_plain = isinstance(indexes, BatchSampler) and type(indexes).__iter__ is BatchSampler.__iter__
    return indexes if is_plain and isinstance(indexes.sampler, ResumableSampler) else None


class SamplerPosition:
    """The position in a plain DataLoader over a ResumableSampler: computed, nothing is replayed.

    Counts the batches that were handed out, and computes the samples from that.
    """

    name = "sampler"

    def __init__(self, loader: Any, indexes: Any, *, share: Share | None = None) -> None:
        self._loader = loader
        self.loader_state = LoaderState(loader)
        self._sampler: ResumableSampler = getattr(indexes, "sampler", indexes)
        self._batch_size: int = getattr(indexes, "batch_size", 1)  # of all ranks where it is global
        self._global = indexes if isinstance(indexes, GlobalBatchSampler) else None
        self._share = share
        self._progress = Progress()
        self._samples_per_batch = 0
        self._base = 0
        """Samples that were used beside those of the epoch's batches, had all been of this size."""
        self._warned = False

    def begin_epoch(self, epoch: int) -> Iterator[Any]:
        epochs.announce(self._loader, epoch)
        self._progress = Progress(epoch, begun=True)
        self._settle_share(consumed=0)
        return CountedBatches(self._iterate(), self._progress)

    def resume_epoch(self, state: Mapping[str, Any]) -> Iterator[Any]:
        progress = Progress.of(state, strategy=self.name)
        self._progress = progress
        if not progress.begun:
            self.loader_state.put(state["objects"])
            return later_batches(lambda: self.begin_epoch(progress.epoch))
        epochs.announce(self._loader, progress.epoch)
        self._settle_share(consumed=int(state["sampler"]["consumed"]))
        # At the end of an epoch there is nothing to iterate, and who goes over the loader by
        # himself sees the whole epoch, as in an uninterrupted run. Persistent workers are started
        # all the same: there they are when the next epoch begins, which then draws no base seed.
        if progress.finished and not self._loader.persistent_workers:
            batches: Iterator[Any] = iter(())
        else:
            self._sampler.load_state_dict(state["sampler"])
            batches = self._iterate()
        self.loader_state.put(state["objects"])
        return CountedBatches(iter(()) if progress.finished else batches, progress)

    def batches_of_epoch(self, state: Mapping[str, Any]) -> int | None:
        progress = Progress.of(state, strategy=self.name)
        world_size = (self._share or self._sampler.share).world_size
        if not progress.begun or progress.finished or progress.world_size == world_size:
            return None
        consumed = int(state["sampler"]["consumed"])
        sampler, of_all = self._sampler, self._global is not None
        left = sampler.length - consumed if of_all else sampler.left(consumed)
        batches, rest = divmod(left, self._batch_size)
        drops = getattr(self._loader.batch_sampler, "drop_last", False)
        return progress.batches + batches + (rest > 0 and not drops)

    def without_newest(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        ranks = 1 if self._global is not None else int(state["world_size"])
        consumed = int(state["sampler"]["consumed"]) - self._batch_size * ranks
        sampler = {**state["sampler"], "consumed": consumed}
        return {**state, "batches": state["batches"] - 1, "sampler": sampler}

    def left_behind(self) -> Mapping[str, Any] | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        state = self._progress.state_dict(self.name)
        state["sampler"] = self._sampler.state_at(self._progress.epoch, self._consumed())
        state["objects"] = self.loader_state.now(is_replayed=True)
        return state

    def share_of_batch(self) -> tuple[int, int]:
        """Of the batch that was handed out last: this rank's samples, and those of all ranks."""
        if self._global is not None:
            return self._global.share(self._consumed() - self._samples_per_batch)
        return self._batch_size, self._samples_per_batch

    def _consumed(self) -> int:
        return self._base + self._progress.batches * self._samples_per_batch

    def _settle_share(self, *, consumed: int) -> None:
        """Fix for this epoch what a batch takes from the order: at its end the process group, which
        the sampler may follow, can be gone before the last save."""
        share = self._sampler.share
        self._progress.world_size = (self._share or share).world_size
        ranks = 1 if self._global is not None else share.world_size
        self._samples_per_batch = self._batch_size * ranks
        self._base = consumed - self._progress.batches * self._samples_per_batch

    def _iterate(self) -> Iterator[Any]:
        if not self._warned:
            self._warned = True
            warn_of_unseeded_workers(self._loader)
        batches: Iterator[Any] = iter(self._loader)
        if self._global is None or self._global.shards is None:
            return batches
        return self._global.steps(batches, epoch=self._progress.epoch, consumed=self._consumed())


class ReplayPosition:
    """The position in any other loader: begins the epoch again, and skips.

    Saves the random generators and the loader's objects as they were when the epoch began, and
    fetches its batches again. Of persistent workers each has a state of its own.

    Exact for all that follows from those. The data itself must come in the same order again.

    Another number of ranks takes up what is left, if it is known how ranks share the order
    (:class:`~hydroslurm.data.sampler.SharedOrder`): nothing is replayed then, and nothing comes
    twice.
    """

    name = "replay"

    def __init__(self, loader: Any, *, share: Share | None = None) -> None:
        self._loader = loader
        self.loader_state = LoaderState(loader)
        self._share = share
        self._order = shared_order(loader)
        self._progress = Progress()
        self._start_rng: Mapping[str, Any] = {}
        self._start_objects: Mapping[str, Any] = {}
        self._workers = (
            PersistentWorkers(loader, self.loader_state) if keeps_workers(loader) else None
        )
        self._resized: tuple[int, int] | None = None
        """Batches and samples of all ranks that were used when this number of ranks took up the
        epoch; None for one that it has begun."""

    def begin_epoch(self, epoch: int) -> Iterator[Any]:
        self._start_rng = rng.capture()
        self._start_objects = self.loader_state.now()
        self._progress = Progress(epoch, begun=True, world_size=share_now(self._share).world_size)
        self._resized = None
        return CountedBatches(self._iterate(epoch), self._progress)

    def resume_epoch(self, state: Mapping[str, Any]) -> Iterator[Any]:
        progress = Progress.of(state, strategy=self.name)
        world_size = share_now(self._share).world_size
        is_resized = self._takes_up(state, progress, world_size)
        if not is_resized:
            progress.require_world(world_size)
        self._progress, self._resized = progress, None
        if not progress.begun:
            self.loader_state.put(state["objects"])
            return later_batches(lambda: self.begin_epoch(progress.epoch))
        self._start_rng, self._start_objects = state["start_rng"], state["start_objects"]
        batches: Iterator[Any] = iter(())
        if is_resized:
            self._put_start_back()
            self._resized = progress.batches, int(state["consumed"])
            progress.world_size = world_size
            batches = self._iterate_rest(progress.epoch, int(state["consumed"]))
        elif not progress.finished or (self._workers is not None and "workers" in state):
            batches = self._replayed(state, progress)
        self.loader_state.put(state["objects"])
        return CountedBatches(batches, progress)

    def batches_of_epoch(self, state: Mapping[str, Any]) -> int | None:
        progress = Progress.of(state, strategy=self.name)
        share = share_now(self._share)
        if not self._takes_up(state, progress, share.world_size):
            return None
        assert self._order is not None
        length, consumed = len(self._loader.dataset), int(state["consumed"])
        return progress.batches + self._order.batches_left(consumed, length, share)

    def without_newest(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._order is None or "consumed" not in state:
            return state  # it is refused
        used = self._order.batch_size * int(state["world_size"])
        return {**state, "batches": state["batches"] - 1, "consumed": state["consumed"] - used}

    def left_behind(self) -> Mapping[str, Any] | None:
        is_needed = self._workers is not None and self._progress.finished
        return self.state_dict() if is_needed else None

    def state_dict(self) -> dict[str, Any]:
        progress = self._progress
        state = progress.state_dict(self.name)
        state["objects"] = self.loader_state.now(is_replayed=True)
        if progress.begun:
            state["start_rng"] = self._start_rng
            state["start_objects"] = self._start_objects
            if self._workers is not None and self._workers.are_started and not self._resized:
                state["workers"] = self._workers.state_dict()
            if self._order is not None and progress.world_size <= self._order.most_ranks:
                batches, samples = self._resized or (0, 0)
                since = progress.batches - batches
                state["consumed"] = samples + since * self._order.batch_size * progress.world_size
                state["resized"] = self._resized is not None
                state["order"] = self._order.name
        return state

    def _takes_up(self, state: Mapping[str, Any], progress: Progress, world_size: int) -> bool:
        """Whether the rest of this epoch is shared out anew."""
        order = self._order
        if order is None or state.get("order") != order.name or world_size > order.most_ranks:
            return False
        if not progress.begun or progress.finished:
            return False
        return bool(state["resized"]) or progress.world_size != world_size

    def _put_start_back(self) -> None:
        rng.restore(self._start_rng)
        self.loader_state.put(self._start_objects)

    def _replayed(self, state: Mapping[str, Any], progress: Progress) -> Iterator[Any]:
        """The batches of the epoch behind those that were used. Persistent workers go through all
        of one that is over: the next epoch begins with what they have then."""
        if self._workers is not None and "workers" in state:
            epochs.announce(self._loader, progress.epoch)
            batches = self._workers.resume_epoch(state["workers"], self._put_start_back)
        else:
            self._put_start_back()
            batches = self._iterate(progress.epoch)
        if share_now(self._share).rank == 0 and progress.batches:
            _warn_of_replay(progress.batches, unknown=_unknown_sampler(self._loader))
        _skip(batches, progress.batches)
        if progress.finished:
            deque(batches, maxlen=0)
        return batches

    def _iterate(self, epoch: int) -> Iterator[Any]:
        epochs.announce(self._loader, epoch)
        if self._workers is not None:
            return self._workers.begin_epoch()
        return iter(self._loader)

    def _iterate_rest(self, epoch: int, consumed: int) -> Iterator[Any]:
        epochs.announce(self._loader, epoch)
        assert self._order is not None
        rest = self._order.rest(consumed, share_now(self._share))
        return iter(loader_of(self._loader, rest))


def _unknown_sampler(loader: Any) -> str | None:
    """The class of a sampler of somebody's own, whose random numbers may lie anywhere."""
    known = ("torch", "hydroslurm", "accelerate")
    kinds = map(type, epochs.samplers(loader))
    names = (one.__name__ for one in kinds if one.__module__.partition(".")[0] not in known)
    return next(names, None)


def _warn_of_replay(count: int, *, unknown: str | None) -> None:
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


def _skip(batches: Iterator[Any], count: int) -> None:
    for done in range(count):
        try:
            next(batches)
        except StopIteration:
            raise StateMismatch(
                f"{count} batches of the epoch had been used, but the loader ended after {done}; "
                "its data or its batch size is not what it was"
            ) from None
