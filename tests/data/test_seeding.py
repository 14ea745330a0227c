"""Augmentation that depends on the seed, the epoch and the sample, and on nothing else."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from hydroslurm.checkpoint import rng
from hydroslurm.data import ResumableSampler, SampleIndex, SeededDataset, position_of
from hydroslurm.errors import UsageError

sys.path.insert(0, str(Path(__file__).parent))

from loops import Augmented, AugmentedStream, same


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
    """For one (seed, epoch, index) always the same; for another of either, others."""
    data = SeededDataset(Augmented(), seed=1)
    first = data[at(2)]
    random.seed(9), numpy.random.seed(9), torch.manual_seed(9)
    assert same(data[at(2)], first)
    others = [data[at(3)], data[at(2, 4)], SeededDataset(Augmented(), seed=2)[at(2)]]
    numbers = {tuple(each[1:].tolist()) for each in (first, *others)}
    assert len(numbers) == 4
    assert len({value for row in numbers for value in row}) == 12, "the three generators differ"


def test_the_numbers_are_fixed_for_ever() -> None:
    """A run that comes back with a later release augments alike."""
    expected = torch.tensor(
        [3.0, 0.5528238506418903, 0.8245695097736031, 0.8977440862934595], dtype=torch.float64
    )
    assert same(SeededDataset(Augmented(), seed=1)[at(2)], expected)


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
    """Tensors and numpy integers are indexes too; a key of another kind has a seed as well."""
    data = SeededDataset(Augmented())
    assert same(data[torch.tensor(3)][1:], data[3][1:])
    assert same(data[numpy.int64(3)][1:], data[3][1:])
    names = SeededDataset({"a": 1, "b": 2})
    assert names["a"] == 1


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


def test_what_has_no_index() -> None:
    """A stream cannot be seeded by index, and the message says what to do."""

    with pytest.raises(UsageError, match="seed in its __iter__"):
        SeededDataset(AugmentedStream())
