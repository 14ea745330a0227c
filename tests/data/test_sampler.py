"""One order for all ranks, that can be taken up anywhere and by any number of them."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, default_collate

from hydroslurm.checkpoint import rng
from hydroslurm.data import ResumableSampler, SampleIndex
from hydroslurm.errors import StateMismatch, UsageError

lengths = st.integers(0, 200)
worlds = st.integers(1, 7)
seeds = st.integers(0, 2**63)


def ranks(length: int, world: int, state: Any = None, **options: Any) -> list[ResumableSampler]:
    made = [ResumableSampler(length, rank=r, world_size=world, **options) for r in range(world)]
    for sampler in made:
        if state is not None:
            sampler.load_state_dict(state)
    return made


def interleaved(samplers: list[ResumableSampler], steps: int | None = None) -> list[int]:
    """What all ranks see, step by step."""
    each = [itertools.islice(sampler, steps) for sampler in samplers]
    return [index for step in zip(*each, strict=True) for index in step]


@example(length=1, world=7, offset=0, seed=0, epoch=1, drop_last=False, shuffle=True)
@given(
    length=lengths,
    world=worlds,
    offset=st.integers(0, 250),
    seed=seeds,
    epoch=st.integers(0, 10**6),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_resumed_at_any_offset(
    length: int, world: int, offset: int, seed: int, epoch: int, drop_last: bool, shuffle: bool
) -> None:
    """From any offset come the rest of the order of one rank, each sample once, and with
    ``drop_last=False`` its first few again: equally many for each rank."""
    one = ResumableSampler(length, shuffle=shuffle, seed=seed)
    one.set_epoch(epoch)
    whole = list(one)
    assert sorted(whole) == list(range(length))
    state = one.state_at(epoch, offset)
    samplers = ranks(length, world, state, drop_last=drop_last, shuffle=shuffle, seed=seed)
    rest = whole[min(offset, length) :]
    repeats = [] if drop_last else whole * world
    seen = interleaved(samplers)
    count = len(rest) // world if drop_last else -(-len(rest) // world)
    assert seen == (rest + repeats)[: count * world]
    assert samplers[0].left(offset) == count
    assert samplers[0].state_dict()["epoch"] == epoch


@pytest.mark.parametrize("drop_last", [False, True])
@given(length=st.integers(1, 50), world=worlds)
def test_numbers_as_distributed_sampler_has_them(length: int, world: int, drop_last: bool) -> None:
    """Padding and dropping follow torch's own rules, seen without a shuffle."""
    for rank in range(world):
        theirs = DistributedSampler(
            range(length),  # type: ignore[arg-type]
            world,
            rank,
            shuffle=False,
            drop_last=drop_last,
        )
        ours = ResumableSampler(
            length, rank=rank, world_size=world, shuffle=False, drop_last=drop_last
        )
        if not drop_last or length >= world:  # theirs fails with fewer samples than ranks
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)


def test_the_order_is_fixed_for_ever() -> None:
    """A checkpoint of today must find the same order in a later release."""
    sampler = ResumableSampler(10, seed=7)
    sampler.set_epoch(2)
    assert list(sampler) == [6, 4, 5, 8, 0, 9, 7, 3, 1, 2]


def test_orders_differ() -> None:
    """Each epoch and each seed has its own; epoch 1 of seed 0 is not epoch 0 of seed 1."""
    orders = set()
    for seed, epoch in itertools.product(range(4), range(4)):
        sampler = ResumableSampler(50, seed=seed)
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    assert len(orders) == 16


def test_global_generators_are_left_alone() -> None:
    """Neither read nor moved: the order is the sampler's own."""
    before = rng.capture()
    first = list(ResumableSampler(100))
    after = rng.capture()
    assert rng.digest_of(before) == rng.digest_of(after)
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    assert list(ResumableSampler(100)) == first


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
