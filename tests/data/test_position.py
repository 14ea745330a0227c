"""A run that is stopped anywhere sees the batches and the random numbers of one that is not."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from hydroslurm.data import ResumableSampler, SeededDataset, position_of
from hydroslurm.errors import StateMismatch, UnsavableState, UsageError

sys.path.insert(0, str(Path(__file__).parent))

from loops import (
    BATCH,
    EPOCHS,
    SAMPLES,
    STEPS,
    STOPS,
    Augmented,
    AugmentedStream,
    CountedStream,
    assert_same_run,
    run,
    same,
    samples,
)

# torchdata 0.11 still calls it
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

Make = Callable[[], Any]

SKIPPED = pytest.mark.filterwarnings("ignore:resuming inside an epoch")


def seeded() -> SeededDataset:
    return SeededDataset(Augmented(), seed=3)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def sampled(dataset: Any, **options: Any) -> DataLoader[Any]:
    sampler = ResumableSampler(dataset, seed=1)
    return DataLoader(dataset, batch_size=BATCH, sampler=sampler, **options)


def stateful(dataset: Any, **options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(dataset, BATCH, **options)


def order() -> ResumableSampler:
    return ResumableSampler(SAMPLES, seed=1)


class Shuffled(Sampler[int]):
    """Draws its order from generators of its own, of every kind."""

    def __init__(self) -> None:
        self.python = random.Random(4)
        self.legacy = numpy.random.RandomState(4)
        self.new = numpy.random.Generator(numpy.random.Philox(4))
        self.torch = generator()

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        indexes = torch.randperm(SAMPLES, generator=self.torch).tolist()
        for one in (self.python, self.legacy, self.new):
            one.shuffle(indexes)  # type: ignore[attr-defined]
        return iter(indexes)


class Noisy(Augmented):
    """Augments from a generator of its own too."""

    def __init__(self) -> None:
        self.noise = numpy.random.default_rng(5)

    def __getitem__(self, index: int) -> torch.Tensor:
        row = super().__getitem__(index)
        row[1] += self.noise.random()
        return row


class Halves(BatchSampler):
    """Batches of a size that nobody can compute."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield from filter(None, (batch[:1], batch[1:]))


ALONE: dict[str, tuple[str, Make]] = {
    "sampler": ("sampler", lambda: sampled(Augmented())),
    "sampler, generator": ("sampler", lambda: sampled(Augmented(), generator=generator())),
    "sampler, batch sampler": (
        "sampler",
        lambda: DataLoader(Augmented(), batch_sampler=BatchSampler(order(), BATCH, False)),
    ),
    "replay": ("replay", lambda: DataLoader(Augmented(), BATCH, shuffle=True)),
    "replay, generator": (
        "replay",
        lambda: DataLoader(Augmented(), BATCH, shuffle=True, generator=generator()),
    ),
    "replay, the sampler's generator": (
        "replay",
        lambda: DataLoader(
            Augmented(), BATCH, sampler=RandomSampler(Augmented(), generator=generator())
        ),
    ),
    "replay, generators of their own": (
        "replay",
        lambda: DataLoader(Subset(Noisy(), range(SAMPLES)), BATCH, sampler=Shuffled()),
    ),
    "stateful, the data set's generator": ("stateful", lambda: stateful(Noisy(), shuffle=True)),
    "replay, stream": ("replay", lambda: DataLoader(AugmentedStream(), BATCH)),
    "stateful": ("stateful", lambda: stateful(Augmented(), shuffle=True)),
    "stateful, generator": (
        "stateful",
        lambda: stateful(Augmented(), shuffle=True, generator=generator()),
    ),
    "stateful, our sampler": ("stateful", lambda: stateful(Augmented(), sampler=order())),
}

WITH_WORKERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "sampler": ("sampler", lambda **options: sampled(seeded(), **options)),
    "replay": ("replay", lambda **options: DataLoader(Augmented(), BATCH, shuffle=True, **options)),
    "replay, generator": (
        "replay",
        lambda **options: DataLoader(
            Augmented(), BATCH, shuffle=True, generator=generator(), **options
        ),
    ),
    "stateful": ("stateful", lambda **options: stateful(seeded(), shuffle=True, **options)),
    "stateful, generator": (
        "stateful",
        lambda **options: stateful(seeded(), shuffle=True, generator=generator(), **options),
    ),
    "stateful, our sampler": (
        "stateful",
        lambda **options: stateful(seeded(), sampler=order(), **options),
    ),
}


def assert_every_sample_once(log: list[Any]) -> None:
    """In each epoch, and in another order in each."""
    seen = samples(log)
    epochs = [seen[first : first + SAMPLES] for first in range(0, EPOCHS * SAMPLES, SAMPLES)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * EPOCHS


@SKIPPED
@pytest.mark.parametrize("kind", ALONE)
def test_stopped_at_every_moment_without_workers(kind: str) -> None:
    """Each moment as the only stop, and all of them one after the other: the same run."""
    name, make = ALONE[kind]
    assert position_of(make()).name == name
    for stop in (*STOPS, *(f"step {n}" for n in range(1, EPOCHS * STEPS + 1))):
        assert_same_run(make, stop)
    assert_every_sample_once(assert_same_run(make, *STOPS))


@SKIPPED
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_stopped_often_with_workers(kind: str, persistent: bool) -> None:
    """Two workers that fetch ahead, kept or made anew in each epoch: the same run."""
    name, make = WITH_WORKERS[kind]

    def two() -> Any:
        return make(num_workers=2, persistent_workers=persistent)

    assert position_of(two()).name == name
    assert_every_sample_once(assert_same_run(two, *STOPS))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_a_stream_that_keeps_its_own_place(options: dict[str, Any]) -> None:
    """An iterable data set with a state goes on inside StatefulDataLoader."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*whose random numbers start anew")
        assert_same_run(lambda: stateful(CountedStream(), **options), *STOPS)


@SKIPPED
def test_workers_that_are_spawned() -> None:
    """The index that knows its epoch, and the seeded data set, survive pickling."""
    one, _ = run(lambda: sampled(seeded()))
    spawned: Make = lambda: sampled(  # noqa: E731
        seeded(), num_workers=1, multiprocessing_context="spawn", persistent_workers=True
    )
    several, _ = run(spawned, "step 3")
    assert same([batch for batch, *_ in one], [batch for batch, *_ in several])


def test_the_number_of_workers_may_change() -> None:
    """Over our sampler and with seeds of its own, a run may come back with other workers."""
    counts = itertools.cycle([0, 2, 1])
    expected = run(lambda: sampled(seeded()))
    seen = run(lambda: sampled(seeded(), num_workers=next(counts)), "step 2", "step 9")
    assert same(expected[0], seen[0])


def test_unseeded_augmentation_in_workers_would_differ() -> None:
    """What SeededDataset is for, and that these tests see it; position_of says so beforehand."""
    with pytest.warns(UserWarning, match=r"wrap it: SeededDataset\(dataset\)"):
        expected, _ = run(lambda: sampled(Augmented(), num_workers=2))
    with pytest.warns(UserWarning, match="start anew"):
        seen, _ = run(lambda: sampled(Augmented(), num_workers=2), "step 2")
    assert samples(expected) == samples(seen)
    assert not same(expected, seen)


def test_batches_fetched_ahead_are_not_counted() -> None:
    """The position is that of the loop, wherever the workers are."""
    position = position_of(sampled(seeded(), num_workers=2, prefetch_factor=4))
    batches = position.begin_epoch(0)
    next(batches)
    state = position.state_dict()
    assert (state["batches"], state["sampler"]["consumed"]) == (1, BATCH)
    assert not state["finished"]
    assert len(list(batches)) == STEPS - 1
    assert position.state_dict()["finished"]


def test_without_batches() -> None:
    """batch_size=None: each sample is a batch of one."""
    make: Make = lambda: DataLoader(Augmented(), batch_size=None, sampler=order())  # noqa: E731
    assert position_of(make()).name == "sampler"
    assert_same_run(make, "step 2", "step 21", "step 22", "end 0", "step 40")


@SKIPPED
def test_a_batch_sampler_of_ones_own_is_replayed() -> None:
    """Where the number of samples in a batch cannot be computed, nothing is guessed."""
    make: Make = lambda: DataLoader(  # noqa: E731
        Augmented(), batch_sampler=Halves(order(), BATCH, False)
    )
    assert position_of(make()).name == "replay"
    assert_every_sample_once(assert_same_run(make, "step 3", "step 5", "end 1"))


@SKIPPED
def test_any_iterable() -> None:
    """A list of batches will do; there is no len() to ask for."""
    make: Make = lambda: (torch.full((1, 4), float(n)) for n in range(STEPS))  # noqa: E731

    class Again:
        def __iter__(self) -> Iterator[Any]:
            return make()

    assert_same_run(Again, *STOPS)


def test_a_replay_says_what_it_costs() -> None:
    """The number of batches that are fetched again, and what would spare them."""
    make: Make = lambda: DataLoader(Augmented(), BATCH, shuffle=True)  # noqa: E731
    with pytest.warns(UserWarning, match=r"2 batches .*ResumableSampler.*StatefulDataLoader"):
        run(make, "step 2")


def test_one_of_several_ranks_says_it() -> None:
    """And not all of them."""

    def resumed(rank: int) -> list[str]:
        loader = DataLoader(Augmented(), BATCH, shuffle=True)
        position = position_of(loader, rank=rank, world_size=2)
        next(position.begin_epoch(0))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            position.resume_epoch(position.state_dict())
        return [str(one.message) for one in seen if "fetched again" in str(one.message)]

    assert [len(resumed(rank)) for rank in (0, 1)] == [1, 0]


def test_a_sampler_that_would_give_other_samples_is_named() -> None:
    """Where its generator cannot be put back in time, before it matters; else where it may lie."""
    with pytest.warns(UserWarning, match=r"Shuffled draws from Shuffled\.python .* others never"):
        position_of(stateful(Augmented(), sampler=Shuffled())).begin_epoch(0)
    with pytest.warns(UserWarning, match=r"fetched again .*\. Shuffled has to give the same order"):
        run(lambda: DataLoader(Augmented(), BATCH, sampler=Shuffled()), "step 2")


@SKIPPED
def test_less_data_than_before() -> None:
    """A loader that ends before the position, or an order of another length, is refused."""
    replayed = position_of([1, 2, 3])
    batches = replayed.begin_epoch(0)
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(StateMismatch, match=r"2 batches .* ended after 1"):
        position_of([1]).resume_epoch(replayed.state_dict())

    sampled_ = position_of(sampled(Augmented()))
    next(sampled_.begin_epoch(0))
    shorter = DataLoader(Augmented(), BATCH, sampler=ResumableSampler(21, seed=1))
    with pytest.raises(StateMismatch, match="length was 22 and is 21"):
        position_of(shorter).resume_epoch(sampled_.state_dict())


def test_another_kind_of_loader() -> None:
    """A position of one kind is not forced upon a loader of another."""
    position = position_of(sampled(Augmented()))
    next(position.begin_epoch(0))
    state = position.state_dict()
    with pytest.raises(StateMismatch, match=r"'sampler'.*'stateful'"):
        position_of(stateful(Augmented())).resume_epoch(state)
    with pytest.raises(StateMismatch, match=r"format"):
        position_of(sampled(Augmented())).resume_epoch({**state, "format": 2})
    with pytest.raises(StateMismatch, match=r"had generators .* \[\] .* \['loader'\]"):
        position_of(sampled(Augmented(), generator=generator())).resume_epoch(state)


def test_stateful_workers_cannot_change() -> None:
    """torchdata would fail with an assertion; here the numbers are named."""
    position = position_of(stateful(Augmented()))
    next(position.begin_epoch(0))
    with pytest.raises(StateMismatch, match="num_workers=0, now it has 2"):
        position_of(stateful(seeded(), num_workers=2)).resume_epoch(position.state_dict())


def test_a_state_that_would_need_pickling() -> None:
    """An object in the loader's state is refused, with its place and type."""

    class Pathological(Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            return index

        def state_dict(self) -> dict[str, Any]:
            return {"file": [random.Random()]}

        def load_state_dict(self, state: Any) -> None: ...

    position = position_of(stateful(Pathological()))
    next(position.begin_epoch(0))
    with pytest.raises(UnsavableState, match=r"Random at .*\['dataset_state'\]\['file'\]\[0\]"):
        position.state_dict()


def test_what_cannot_have_a_position() -> None:
    """Batches in the order in which workers finish, and things that are no loader."""
    with pytest.raises(UsageError, match="in_order"):
        position_of(sampled(seeded(), num_workers=2, in_order=False))
    with pytest.raises(UsageError, match="int"):
        position_of(3)


class _Odd(Dataset[torch.Tensor]):
    """Changes what nothing can bring back."""

    def __init__(self) -> None:
        self.last: object = 0
        self.numbers = iter(range(1000))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.last = threading.Lock()
        return torch.tensor(float(next(self.numbers)))


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["here", "persistent"]
)
def test_what_cannot_be_saved_of_a_loader_is_said(workers: dict[str, Any]) -> None:
    """An object of another kind, and an iterator that goes on from epoch to epoch; within the first
    epoch, which a resumed run draws again, the iterator needs no word."""
    position = position_of(DataLoader(_Odd(), 2, **workers), rank=0, world_size=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in position.begin_epoch(0):
            position.state_dict()
        first = [str(one.message) for one in said]
        for _ in position.begin_epoch(1):
            position.state_dict()
    every = [str(one.message) for one in said]
    assert sum("dataset.last (lock) can be saved no more" in one for one in every) == 1
    assert sum("dataset.numbers (range_iterator) is an iterator" in one for one in every) == 1
    assert not any("iterator" in one for one in first)
    assert len(every) == 2
