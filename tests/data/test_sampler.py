"""One order for all ranks, that can be taken up anywhere and by any number of them; and samples
that are augmented alike whenever they are read."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from checkpoint.states import same
from data.loops import Augmented, AugmentedStream
from torch.utils.data import DataLoader, default_collate

from hydroslurm.checkpoint import rng
from hydroslurm.data import ResumableSampler, SampleIndex, SeededDataset, position_of
from hydroslurm.errors import StateMismatch, UsageError


def test_the_order_is_fixed_for_ever() -> None:
    """A checkpoint of today must find the same order in a later release. Each epoch and each seed
    has its own; epoch 1 of seed 0 is not epoch 0 of seed 1. Global generators are neither read nor
    moved."""
    sampler = ResumableSampler(10, seed=7)
    sampler.set_epoch(2)
    before = rng.digest_of(rng.capture())
    assert list(sampler) == [6, 4, 5, 8, 0, 9, 7, 3, 1, 2]
    assert rng.digest_of(rng.capture()) == before
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    assert list(sampler) == [6, 4, 5, 8, 0, 9, 7, 3, 1, 2]
    orders = set()
    for seed, epoch in itertools.product(range(4), range(4)):
        sampler = ResumableSampler(50, seed=seed)
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    assert len(orders) == 16


def test_a_loop_of_ones_own() -> None:
    """Resumed by hand: set_epoch of the same epoch keeps the place, the next one is whole."""
    sampler = ResumableSampler(10)
    sampler.set_epoch(3)
    seen = list(itertools.islice(sampler, 4))
    again = ResumableSampler(10)
    again.load_state_dict(sampler.state_dict())
    again.set_epoch(3)
    assert sorted(seen + list(again)) == list(range(10))
    assert len(list(again)) == 10, "an epoch that was finished begins from its start"
    again.set_epoch(4)
    assert len(list(again)) == 10
    again.load_state_dict(sampler.state_dict())
    again.set_epoch(4)
    assert len(list(again)) == 10


def test_another_order_is_refused() -> None:
    """All that differs is named."""
    state = ResumableSampler(10, seed=1).state_dict()
    with pytest.raises(StateMismatch, match=r"length was 10 and is 12, shuffle was True and is F"):
        ResumableSampler(12, seed=1, shuffle=False).load_state_dict(state)
    with pytest.raises(UsageError, match="rank must be in"):
        ResumableSampler(3, rank=2, world_size=2)


def test_an_index_is_an_int() -> None:
    """For lists, tensors, arrays, JSON and collate; and it keeps what it knows through a pickle."""
    index = SampleIndex(3, 5, 17)
    assert list(range(9))[index] == torch.arange(9)[index] == numpy.arange(9)[index] == 3
    assert (json.dumps([index]), {3: "x"}[index], f"{index:02d}") == ("[3]", "x", "03")
    assert default_collate([index, index]).tolist() == [3, 3]
    copy = pickle.loads(pickle.dumps(index))
    assert (copy, copy.epoch, copy.position) == (3, 5, 17)


# --- augmentation that depends on the seed, the epoch and the sample, and on nothing else


class Bulk(Augmented):
    """One that reads a whole batch at once."""

    def __getitems__(self, indexes: Sequence[int]) -> list[Any]:
        return [torch.tensor([index, random.random()]) for index in indexes]


class Broken(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        random.random(), numpy.random.rand(), torch.rand(1)
        raise KeyError(index)


def at(epoch: int, index: int = 3) -> SampleIndex:
    return SampleIndex(index, epoch, 0)


def test_the_same_numbers_whatever_came_before() -> None:
    """For one (seed, epoch, index) always the same, also in a later release; for another of either,
    others."""
    first = SeededDataset(Augmented(), seed=1)[at(2)]
    wanted = [3.0, 0.5528238506418903, 0.8245695097736031, 0.8977440862934595]
    assert same(first, torch.tensor(wanted, dtype=torch.float64))
    data = SeededDataset(Augmented(), seed=1)
    random.seed(9), numpy.random.seed(9), torch.manual_seed(9)
    assert same(data[at(2)], first)
    others = [data[at(3)], data[at(2, 4)], SeededDataset(Augmented(), seed=2)[at(2)]]
    numbers = {tuple(each[1:].tolist()) for each in (first, *others)}
    assert len(numbers) == 4
    assert len({value for row in numbers for value in row}) == 12, "the three generators differ"


@pytest.mark.parametrize("kind", [Augmented, Broken, Bulk])
def test_the_global_generators_are_put_back(kind: type[Augmented]) -> None:
    """After a call, also one that fails, nobody outside can tell."""
    data = SeededDataset(kind())
    random.gauss(0, 1), numpy.random.standard_normal()  # each keeps half of a pair of numbers
    before = rng.capture()
    for read in (data.__getitem__, lambda index: data.__getitems__([index])):
        try:
            read(3)
        except KeyError:
            assert kind is Broken
    assert same(before, rng.capture())


def test_read_in_bulk() -> None:
    """A data set with __getitems__ is called once, seeded from the batch; others one by one."""
    bulk = SeededDataset(Bulk(), seed=1)
    batch = [at(1, 4), at(1, 5)]
    assert same(bulk.__getitems__(batch), bulk.__getitems__(batch))
    assert not same(bulk.__getitems__(batch), bulk.__getitems__([at(2, 4), at(2, 5)]))
    single = SeededDataset(Augmented(), seed=1)
    assert same(single.__getitems__(batch), [single[each] for each in batch])


def test_keys_of_any_kind() -> None:
    """Tensors and numpy integers are indexes too; a key of another kind has a seed as well. A
    stream has none, and the message says what to do."""
    data = SeededDataset(Augmented())
    assert same(data[torch.tensor(3)][1:], data[3][1:])
    assert same(data[numpy.int64(3)][1:], data[3][1:])
    assert SeededDataset({"a": 1, "b": 2})["a"] == 1
    with pytest.raises(UsageError, match="seed in its __iter__"):
        SeededDataset(AugmentedStream())


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_epochs_of_a_plain_sampler(options: dict[str, Any]) -> None:
    """Indexes that know no epoch get the one that position_of names, in kept workers too; before
    anybody names one it is 0."""
    loader = DataLoader(SeededDataset(Augmented()), 4, **options)
    with_own = DataLoader(
        SeededDataset(Augmented()), 4, sampler=ResumableSampler(Augmented(), shuffle=False)
    )
    unnamed = list(loader)
    position, with_own_position = position_of(loader), position_of(with_own)
    for epoch in range(3):
        seen = list(position.begin_epoch(epoch))
        assert same(seen, list(with_own_position.begin_epoch(epoch)))
        assert same(seen, unnamed) == (epoch == 0)
