"""An order of samples that can be taken up at any point, by any number of ranks.

There is one permutation per epoch, a pure function of (seed, epoch, length), for all ranks
together; rank r of w takes the positions c+r, c+r+w, c+r+2w ... after the c samples that all ranks
have consumed. So *epoch* and *c* are the whole state, and they do not depend on the number of
ranks: a run may stop with three and come back with two (Horovod's ElasticSampler has the idea).

The steps of an epoch are the same for every number of ranks, if batch size x ranks is and if
sampler and loader have the same ``drop_last``: both round the samples that are left to whole
batches of all ranks then, both up or both down.

torch's DistributedSampler and accelerate's BatchSamplerShard share one order out, batch by batch:
once each of w ranks has used b batches of n samples, the first b·w·n of that order are used, and
the rest can be shared out among any number of ranks (:class:`SharedOrder`). So a script that knows
nothing of it may be stopped with three ranks and go on with two, inside an epoch. The order is
asked of the sampler itself, for a single rank; nothing of its arithmetic is repeated here. Only
these two classes, over a plain BatchSampler, are known to work so: a subclass, or a sampler of
somebody's own, is not taken up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from hydroslurm.data.seeding import derive
from hydroslurm.errors import StateMismatch, UsageError


class SampleIndex(int):
    """An index into the data set that knows the epoch it is for, and its place in its order.

    An ``int`` in every other respect; both survive the way to a DataLoader worker. A place of
    len(data) or more is a repeat, which gives all ranks equally many (see ``drop_last``).
    """

    epoch: int
    position: int

    def __new__(cls, index: int, epoch: int, position: int) -> SampleIndex:
        self = super().__new__(cls, index)
        self.epoch = epoch
        self.position = position
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleIndex, (int(self), self.epoch, self.position)


@dataclass
class _Pass:
    """One way through the rest of an epoch."""

    epoch: int
    start: int
    share: Share
    yielded: int = 0

    @property
    def consumed(self) -> int:
        """The samples of the epoch that all ranks have taken, if each is as far as this one."""
        return self.start + self.yielded * self.share.world_size


class ResumableSampler(Sampler[int]):
    """The samples of one rank, in an order that can be resumed anywhere.

    Args:
        data: the data set, or its length.
        shuffle: a permutation for each epoch; else the order of the data set.
        seed: with the epoch and the length, all that the order depends on. The same on all ranks.
        rank, world_size: whose samples these are. ``None`` follows torch.distributed: each
            iterator asks it when it begins. Where that is not initialised, the rank is the one
            that ``position_of`` was told, or 0 of 1.
        drop_last: what happens when the samples (left) cannot be divided by the ranks. As in
            torch's DistributedSampler: ``True`` leaves out the last few, ``False`` (the default)
            repeats the first few of the epoch's order, so that all ranks have equally many.
            With one rank neither happens.

    The global generators are neither read nor changed. Never shared between threads.

    A loop of one's own calls ``set_epoch(epoch)`` before each epoch, as with DistributedSampler;
    ``hydroslurm.data.position_of(loader)`` does it itself.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self.length = data if isinstance(data, int) else len(data)
        if self.length < 0:
            raise UsageError(f"a length of at least 0 is wanted, not {self.length}")
        self.shuffle = shuffle
        self.seed = seed
        self._given = share_given(rank, world_size)
        self._told = Share()
        self.drop_last = drop_last
        self.epoch = 0
        self._start = 0
        self._latest: _Pass | None = None

    @property
    def share(self) -> Share:
        """Whose samples an iterator that begins now would give."""
        return self._given or share_of_process() or self._told

    @property
    def rank(self) -> int:
        return self.share.rank

    @property
    def world_size(self) -> int:
        return self.share.world_size

    def tell(self, share: Share) -> None:
        """Name the share for a sampler that was given none, where torch.distributed is not
        initialised."""
        self._told = share

    def __len__(self) -> int:
        """The samples of this rank in a whole epoch, also when the epoch is resumed in its
        middle: progress bars and schedulers want a number that stays. See :meth:`left`."""
        return self.left(0)

    def left(self, consumed: int) -> int:
        """The samples of this rank once all ranks together have consumed so many."""
        return len(places(consumed, self.length, self.share, drop_last=self.drop_last))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iterator is for. From its start, unless it is the epoch
        that :meth:`load_state_dict` has named and that was not finished since."""
        if epoch != self.epoch:
            self.epoch, self._start, self._latest = epoch, 0, None

    def start_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iterator is for, from its start in any case."""
        self.epoch, self._start, self._latest = epoch, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Where the latest iterator is: the epoch, and the samples that all ranks have consumed.

        It counts what *left the sampler*. A plain DataLoader with workers fetches ahead, so its
        position is ``position_of(loader).state_dict()`` and not this; torchdata's
        StatefulDataLoader asks for this with every batch and keeps the right one.
        """
        if self._latest is None:
            return self.state_at(self.epoch, self._start)
        return self.state_at(self._latest.epoch, self._latest.consumed)

    def begin_state(self) -> dict[str, Any]:
        """Where the latest iterator began."""
        return self.state_at(self.epoch, self._start)

    def state_at(self, epoch: int, consumed: int) -> dict[str, Any]:
        """The state in which all ranks together have consumed so many samples of an epoch."""
        return {
            "epoch": epoch,
            "consumed": min(consumed, self.length),
            "seed": self.seed,
            "length": self.length,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iterator go on from a state; the number of ranks may be another.

        Raises:
            StateMismatch: the order was another one: other seed, length or shuffle.
        """
        differing = [
            f"{name} was {state.get(name)!r} and is {getattr(self, name)!r}"
            for name in ("length", "seed", "shuffle")
            if state.get(name) != getattr(self, name)
        ]
        if differing:
            raise StateMismatch(
                "the saved position belongs to another order of samples: "
                f"{', '.join(differing)}; give the sampler what it had, or begin a new run"
            )
        self.start_epoch(int(state["epoch"]))
        self._start = int(state["consumed"])

    def __iter__(self) -> Iterator[int]:
        # DataLoader makes two iterators and uses the second; so nothing may be used up here,
        # and the state follows the one that was made last
        self._latest = _Pass(self.epoch, self._start, self.share)
        return self._indexes(self._latest)

    def begin_pass(self) -> tuple[Any, int]:
        """For who takes the order itself, for all ranks together: the permutation of this epoch
        (None: the order of the data set), and how many of its samples are used already."""
        return self._order(self.epoch), self._start

    def end_pass(self, epoch: int) -> None:
        """The order of this epoch was taken to its end: the next pass begins at the beginning."""
        if self.epoch == epoch:
            self._start = 0

    def _indexes(self, this: _Pass) -> Iterator[SampleIndex]:
        order = self._order(this.epoch)
        for position in places(this.start, self.length, this.share, drop_last=self.drop_last):
            place = position % self.length
            this.yielded += 1
            yield SampleIndex(place if order is None else int(order[place]), this.epoch, position)
        self.end_pass(this.epoch)

    def _order(self, epoch: int) -> Any:
        """The epoch's permutation. From numpy's legacy generator, because its stream alone is
        promised never to change (NEP 19): a run may come back with another torch."""
        if not self.shuffle:
            return None
        words = numpy.frombuffer(derive("order", self.seed, epoch, self.length), dtype="<u4")
        return numpy.random.RandomState(words).permutation(self.length)


@dataclass(frozen=True)
class Share:
    """One rank's part of what all ranks do together."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank must be in 0..world_size-1, not {self.rank} of {self.world_size}"
            )


def places(consumed: int, length: int, share: Share, *, drop_last: bool) -> range:
    """One rank's places in an order, once all ranks have consumed so many samples of it: as many
    for each rank. Those of ``length`` or more are repeats, of the first samples of the order.

    Args:
        drop_last: leave out the last samples where they are fewer than the ranks.
    """
    left, each_of = max(0, length - consumed), share.world_size
    count = left // each_of if drop_last else -(-left // each_of)
    first = consumed + share.rank
    return range(first, first + count * each_of, each_of)


def share_given(rank: int | None, world_size: int | None) -> Share | None:
    """The share that a caller has named; None when neither number was given.

    Raises:
        UsageError: only one of the two, or a rank outside of the world.
    """
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise UsageError(
            f"rank={rank}, world_size={world_size}: wanted both of them, or neither to follow "
            "torch.distributed"
        )
    return Share(rank, world_size)


def share_of_process() -> Share | None:
    """This process in torch.distributed's default group; None where that is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return Share(dist.get_rank(), dist.get_world_size())


def share_now(given: Share | None) -> Share:
    """The share of a loop that was told it, or else follows torch.distributed."""
    return given or share_of_process() or Share()


# --- what other samplers leave of an epoch
# ------------------------------------------------------------------------------------------------

_SAMPLERS = ("torch.utils.data", "accelerate.data_loader")
"""Packages whose samplers draw from a generator that a position puts back, or from a seed."""

_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
    *("multiprocessing_context", "prefetch_factor", "pin_memory_device", "in_order"),
)


@dataclass(frozen=True)
class SharedOrder:
    """How the ranks share the samples of an epoch.

    Attributes:
        name: of the order: one of another name is another one.
        batch_size: of one rank.
        drop_uneven: the last samples, which the ranks cannot share evenly, are left out; else the
            first ones are repeated.
        drop_last: a batch that is not full is left out.
        indexes: makes the whole epoch's order, for the epoch that was announced last, from the
            generators as they are. It may draw from them.
        most_ranks: more would not share it: each would go through all of it.
    """

    name: str
    batch_size: int
    drop_uneven: bool
    drop_last: bool
    indexes: Callable[[], list[int]]
    most_ranks: int = 1 << 30

    def batches_left(self, consumed: int, length: int, share: Share) -> int:
        """Of each rank, once so many samples of the epoch are used."""
        each = len(places(consumed, length, share, drop_last=self.drop_uneven))
        return each // self.batch_size if self.drop_last else -(-each // self.batch_size)

    def rest(self, consumed: int, share: Share) -> list[list[int]]:
        """The batches of one rank behind the first samples of the order; all ranks have equally
        many."""
        whole = self.indexes()
        left = places(consumed, len(whole), share, drop_last=self.drop_uneven)
        mine = [whole[place % len(whole)] for place in left]
        return list(BatchSampler(mine, self.batch_size, self.drop_last))


def shared_order(loader: Any) -> SharedOrder | None:
    """How ranks share this loader's samples; None if it is not known."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    batches: Any = loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    if type(batches) is BatchSampler and type(sampler) is DistributedSampler:
        name = f"DistributedSampler(shuffle={sampler.shuffle}, seed={sampler.seed})"
        drops = (sampler.drop_last, batches.drop_last)
        return SharedOrder(name, batches.batch_size, *drops, lambda: _whole(sampler))
    # accelerate's, by its name: it need not be installed. For one rank it makes none
    is_shard = type(batches).__name__ == "BatchSamplerShard" and not batches.split_batches
    inner: Any = batches.batch_sampler if is_shard else batches
    if type(inner) is not BatchSampler or not _gives_each_once(inner.sampler, loader.dataset):
        return None
    if is_shard and not (batches.even_batches or inner.drop_last):
        return None
    name, drops = type(inner.sampler).__name__, (inner.drop_last, inner.drop_last)
    order = SharedOrder(name, inner.batch_size, *drops, lambda: list(inner.sampler))
    return order if is_shard else replace(order, most_ranks=1)


def _whole(sampler: DistributedSampler[Any]) -> list[int]:
    """The order that all ranks share."""
    alone = copy.copy(sampler)
    alone.num_replicas, alone.rank, alone.drop_last = 1, 0, False
    alone.num_samples = alone.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    return list(alone)


def _gives_each_once(sampler: Any, data: Any) -> bool:
    """Of torch's, and accelerate's subclass, those that go through the whole data set."""
    is_known = type(sampler).__module__.startswith(_SAMPLERS) and isinstance(
        sampler, (RandomSampler, SequentialSampler)
    )
    return is_known and not getattr(sampler, "replacement", False) and len(sampler) == len(data)


def loader_of(loader: Any, batches: list[list[int]]) -> DataLoader[Any]:
    """A loader as this one, for exactly these batches."""
    # in_order is newer than the oldest torch
    options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    return DataLoader(loader.dataset, batch_sampler=batches, **options)
