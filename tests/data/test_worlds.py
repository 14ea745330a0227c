"""A run that comes back with another number of ranks: three, then two, then four."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from hydroslurm.data import ResumableSampler, SeededDataset, position_of
from hydroslurm.data.position import LoaderPosition
from hydroslurm.errors import StateMismatch, UsageError

# torchdata 0.11 still calls it
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

EPOCHS = 2
MANY = 10**6

# worlds that divide the global batch, each with the steps that an attempt of it makes
attempts = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(0, 9)), max_size=6)


class Indexes(Dataset[Any]):
    """A data set whose samples are their index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return int(index)


class Places(Indexes):
    """A data set whose samples are their index and their place in the order of the epoch."""

    def __getitem__(self, index: Any) -> Any:
        return int(index), index.position


class World:
    """All ranks of one attempt, each with a loader and a position of its own."""

    def __init__(self, length: int, world: int, size: int, *, drops: tuple[bool, bool]) -> None:
        sampler_drops, loader_drops = drops
        self.positions: list[LoaderPosition] = []
        for rank in range(world):
            sampler = ResumableSampler(length, drop_last=sampler_drops)
            loader = DataLoader(Places(length), size, sampler=sampler, drop_last=loader_drops)
            self.positions.append(position_of(loader, rank=rank, world_size=world))

    def train(self, state: Any, steps: int) -> tuple[list[tuple[int, Any]], Any]:
        """Go on from one rank's state for so many steps, or to the end of the last epoch.

        Returns the epoch and all ranks' (index, place) of each step, and the state of rank 0.
        """
        seen: list[tuple[int, Any]] = []
        first = state["epoch"] if state else 0
        for epoch in range(first, EPOCHS):
            resumed = epoch == first and state is not None
            ranks = [
                position.resume_epoch(state) if resumed else position.begin_epoch(epoch)
                for position in self.positions
            ]
            while len(seen) < steps:
                step = [next(batches, None) for batches in ranks]
                if None in step:
                    assert step == [None] * len(step), "the ranks end together"
                    break
                seen.append((epoch, [rows(batch) for batch in step]))
            else:
                break
        return seen, self.state()

    def state(self) -> Any:
        states = [position.state_dict() for position in self.positions]
        assert all(state == states[0] for state in states), "all ranks are at the same place"
        return states[0]


def rows(batch: Any) -> list[Any]:
    if isinstance(batch, torch.Tensor):
        return [batch.tolist()]
    indexes, places = batch
    return list(zip(indexes.tolist(), places.tolist(), strict=True))


def train(
    length: int,
    parts: list[tuple[int, int]],
    size: Any,
    *,
    drops: tuple[bool, bool],
    last_world: int = 1,
) -> list[tuple[int, Any]]:
    """All attempts, the last of them to the end."""
    seen: list[tuple[int, Any]] = []
    state = None
    for world, steps in [*parts, (last_world, MANY)]:
        more, state = World(length, world, size(world), drops=drops).train(state, steps)
        seen += more
    return seen


def places(seen: list[tuple[int, Any]], epoch: int) -> list[int]:
    """The places in the order of the epoch that all ranks' batches came from, sorted."""
    steps = (step for when, step in seen if when == epoch)
    return sorted(place for step in steps for batch in step for _, place in batch)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 60) | st.sampled_from([12, 24, 48]),
    size=st.integers(1, 2),
    parts=attempts,
    drop=st.booleans(),
)
def test_each_sample_once_over_any_worlds(
    length: int, size: int, parts: list[tuple[int, int]], drop: bool
) -> None:
    """With one drop_last for sampler and loader the number of steps is that of one rank, and each
    step takes the samples that it takes with one rank; the last few samples are left out, or the
    first few of the order repeated, and nothing else happens."""
    of_all = 12 * size
    seen = train(length, parts, lambda world: of_all // world, drops=(drop, drop))
    alone = train(length, [], lambda world: of_all // world, drops=(drop, drop))
    order: dict[tuple[int, int], int] = {}
    for (epoch, step), (alone_epoch, (whole,)) in zip(seen, alone, strict=True):
        assert epoch == alone_epoch
        found = sorted(row for batch in step for row in batch)
        assert found == sorted(whole) or (len(whole) < of_all and set(whole) <= set(found))
        for index, place in found:
            assert order.setdefault((epoch, place % length), index) == index
    for epoch in range(EPOCHS):
        found = places(seen, epoch)
        if drop:
            assert found == list(range(length // of_all * of_all))
        else:
            assert found == list(range(max(length, len(found))))
            assert len(found) - length < max([world for world, _ in parts], default=1)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 60),
    parts=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=6),
    sizes=st.lists(st.integers(1, 4), min_size=7, max_size=7),
    drops=st.tuples(st.booleans(), st.booleans()),
    last_world=st.integers(1, 5),
)
def test_whatever_the_worlds_and_batches_are(
    length: int,
    parts: list[tuple[int, int]],
    sizes: list[int],
    drops: tuple[bool, bool],
    last_world: int,
) -> None:
    """Other batches in each attempt, and mixed rules at the end: no place in the order comes twice,
    and none is passed over."""
    size = iter(sizes)
    seen = train(length, parts, lambda _: next(size), drops=drops, last_world=last_world)
    for epoch in range(EPOCHS):
        found = places(seen, epoch)
        assert found == list(range(len(found)))
        if drops == (False, False):
            assert len(found) >= length


# --- who a rank is


@pytest.fixture
def third_of_four() -> Iterator[None]:
    """This process is rank 2 of 4 to torch.distributed; nobody else is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_sampler_follows_the_process_group(third_of_four: None) -> None:
    """Asked when an iterator begins; a rank that was given stays."""
    following, given_ = ResumableSampler(8), ResumableSampler(8, rank=0, world_size=2)
    assert (following.rank, following.world_size, len(following)) == (2, 4, 2)
    assert list(following) == list(ResumableSampler(8, rank=2, world_size=4))
    assert (given_.rank, given_.world_size, len(given_)) == (0, 2, 4)
    iterator = iter(following)
    next(iterator)
    dist.destroy_process_group()
    assert following.state_dict()["consumed"] == 4, "what has begun with four ranks stays theirs"
    assert (following.rank, following.world_size, len(list(following))) == (0, 1, 8)


def test_a_position_follows_the_process_group(third_of_four: None) -> None:
    """Also when the group is gone before the last save of the epoch. Without a group a sampler
    takes the rank that its position was told, unless it was given one of its own (model parallel
    ranks share their samples). Half a rank is refused."""
    position = position_of(DataLoader(Indexes(16), 2, sampler=ResumableSampler(16)))
    next(position.begin_epoch(0))
    dist.destroy_process_group()
    state = position.state_dict()
    assert (state["world_size"], state["sampler"]["consumed"]) == (4, 8)
    told, own = ResumableSampler(8), ResumableSampler(8, rank=0, world_size=2)
    for sampler, expected in ((told, (3, 4)), (own, (0, 2))):
        loader = DataLoader(Indexes(8), 2, sampler=sampler)
        position = position_of(loader, rank=3, world_size=4)
        list(position.begin_epoch(0))
        assert position.state_dict()["world_size"] == 4
        assert (sampler.rank, sampler.world_size) == expected
    for half in (lambda: position_of([1], rank=1), lambda: ResumableSampler(3, world_size=2)):
        with pytest.raises(UsageError, match="both of them"):
            half()
    with pytest.raises(UsageError, match="not 2 of 2"):
        position_of([1], rank=2, world_size=2)


# --- loaders that cannot


@pytest.mark.parametrize(
    "make", [lambda: [1, 2, 3], lambda: StatefulDataLoader(Indexes(6), 2)], ids=["list", "stateful"]
)
def test_loaders_that_only_the_same_ranks_can_resume(make: Any) -> None:
    """Inside an epoch the numbers are named; before it and at its end another world goes on."""
    position = position_of(make(), rank=0, world_size=3)
    unbegun = position.state_dict()
    batches = position.begin_epoch(0)
    next(batches)
    inside = position.state_dict()
    list(batches)
    end = position.state_dict()
    for rank, world_size in ((0, 2), (1, 4)):
        other = position_of(make(), rank=rank, world_size=world_size)
        with pytest.raises(StateMismatch, match=rf"epoch 0, which 3 .* there are {world_size}.*Re"):
            other.resume_epoch(inside)
        assert len(list(other.resume_epoch(unbegun))) == 3
        assert other.state_dict()["world_size"] == world_size
        other = position_of(make(), rank=rank, world_size=world_size)
        assert list(other.resume_epoch(end)) == []
        assert other.state_dict()["finished"]
        assert len(list(other.begin_epoch(1))) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a replay costs
        again = position_of(make(), rank=0, world_size=3).resume_epoch(inside)
    assert len(list(again)) == 2


def test_a_new_rank_takes_the_generators_of_rank_0() -> None:
    """The loader's and the sampler's own, from a save that it had no part in."""

    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        data = SeededDataset(torch.arange(24))
        return DataLoader(data, 2, sampler=ResumableSampler(24), generator=generator)

    first = position_of(loader(), rank=0, world_size=2)
    next(first.begin_epoch(0))
    first._loader.generator.manual_seed(77)  # type: ignore[attr-defined]
    state = first.state_dict()
    new = loader()
    batches = position_of(new, rank=3, world_size=4).resume_epoch(state)
    assert new.generator is not None
    assert new.generator.initial_seed() == 77
    assert torch.equal(next(batches), torch.tensor(list(ResumableSampler(24))[4:][3::4][:2]))


# --- samplers that are not ours: torch's DistributedSampler, and what accelerate prepares


def stock_loader(kind: str, length: int, size: int, *, rank: int, world: int, drop: bool) -> Any:
    """As Lightning and Hugging Face make it of ``DataLoader(data, size, shuffle=True)``."""
    from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler

    data: Any = Indexes(length)
    if kind == "torch":
        sampler: Any = DistributedSampler(data, world, rank, seed=3, drop_last=drop)
        return DataLoader(data, size, sampler=sampler, drop_last=drop)
    sampler = SeedableRandomSampler(data, generator=torch.Generator(), data_seed=3)
    batches: Any = BatchSampler(sampler, size, drop)
    if world > 1:
        batches = BatchSamplerShard(batches, world, rank)
    return DataLoader(data, batch_sampler=batches)


class StockWorld(World):
    """All ranks of one attempt with such loaders."""

    def __init__(self, kind: str, length: int, world: int, size: int, *, drop: bool) -> None:
        self.positions = [
            position_of(
                stock_loader(kind, length, size, rank=rank, world=world, drop=drop),
                rank=rank,
                world_size=world,
            )
            for rank in range(world)
        ]

    def state(self) -> Any:
        return self.positions[0].state_dict()


@pytest.mark.parametrize("kind", ["torch", "accelerate"])
@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 60),
    size=st.integers(1, 3),
    parts=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), max_size=4),
    last=st.integers(1, 4),
    drop=st.booleans(),
)
def test_other_samplers_are_shared_out_anew(
    kind: str, length: int, size: int, parts: list[tuple[int, int]], last: int, drop: bool
) -> None:
    """torch's DistributedSampler and accelerate's shards: over any sequence of worlds each sample
    of an epoch comes, once but for what fills the last batches up, and the rest of an epoch is as
    long as was said."""
    seen: list[tuple[int, Any]] = []
    state: Any = None
    for world, steps in [*parts, (last, MANY)]:
        ranks = StockWorld(kind, length, world, size, drop=drop)
        said = ranks.positions[0].batches_of_epoch(state) if state else None
        used = state["batches"] if state else 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a replay costs
            more, state_now = ranks.train(state, steps)
        if said is not None and steps == MANY:
            first = [one for one in more if one[0] == state["epoch"]]
            assert len(first) == said - used
        state = state_now
        seen += more
    worlds = [*(world for world, _ in parts), last]
    for epoch in range(EPOCHS):
        found = [int(n) for when, step in seen if when == epoch for b in step for n in b[0]]
        if drop:
            assert len(found) == len(set(found))
        else:
            assert set(found) == set(range(length))
            assert len(found) - length < (
                max(worlds) * size if kind == "accelerate" else max(worlds)
            )


def test_an_order_that_is_not_shared_is_refused() -> None:
    """Each rank that shuffles for itself goes through all of the data; two kinds of samplers have
    two orders; a sampler of somebody's own is not known."""
    two = StockWorld("torch", 30, 2, 2, drop=False)
    _, state = two.train(None, 3)
    assert state["order"] == "DistributedSampler(shuffle=True, seed=3)"
    data: Any = Indexes(30)
    other = type("Own", (DistributedSampler,), {})(data, 1, 0, seed=3)
    for loader in (
        DataLoader(data, 2, shuffle=True),
        DataLoader(data, 2, sampler=other),
        stock_loader("accelerate", 30, 2, rank=0, world=1, drop=False),
    ):
        with pytest.raises(StateMismatch, match="2 ranks had begun"):
            position_of(loader, rank=0, world_size=1).resume_epoch(state)
    each = position_of(DataLoader(data, 2, shuffle=True), rank=0, world_size=1)
    next(each.begin_epoch(0))
    alone = each.state_dict()
    with pytest.raises(StateMismatch, match="1 ranks had begun"):
        position_of(DataLoader(data, 2, shuffle=True), rank=0, world_size=2).resume_epoch(alone)
