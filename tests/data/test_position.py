"""A run that is stopped anywhere sees the batches and the random numbers of one that is not."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from checkpoint.states import same
from data.loops import (
    BATCH,
    EPOCHS,
    SAMPLES,
    STEPS,
    STOPS,
    Augmented,
    AugmentedStream,
    CountedStream,
    assert_same,
    run,
    samples,
)
from torch.utils.data import BatchSampler, DataLoader, Sampler, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from hydroslurm.data import ResumableSampler, SeededDataset, position_of
from hydroslurm.errors import StateMismatch, UnsavableState, UsageError

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


KINDS: dict[str, Callable[..., Any]] = {
    "sampler": sampled,
    "sampler, generator": lambda data, **options: sampled(data, generator=generator(), **options),
    "sampler, batch sampler": lambda data, **options: DataLoader(
        data, batch_sampler=BatchSampler(order(), BATCH, False), **options
    ),
    "replay": lambda data, **options: DataLoader(data, BATCH, shuffle=True, **options),
    "replay, generator": lambda data, **options: DataLoader(
        data, BATCH, shuffle=True, generator=generator(), **options
    ),
    "replay, generators of their own": lambda _: DataLoader(
        Subset(Noisy(), range(SAMPLES)), BATCH, sampler=Shuffled()
    ),
    "replay, stream": lambda _: DataLoader(AugmentedStream(), BATCH),
    "replay, any iterable": lambda _: Again(),
    "stateful": lambda data, **options: stateful(data, shuffle=True, **options),
    "stateful, generator": lambda data, **options: stateful(
        data, shuffle=True, generator=generator(), **options
    ),
    "stateful, the data set's generator": lambda _: stateful(Noisy(), shuffle=True),
    "stateful, our sampler": lambda data, **options: stateful(data, sampler=order(), **options),
}
"""By the first word of each how its position is had."""

ALONE = ("of their own", "the data set's generator")
"""What would differ between workers."""
WORKERS = [*itertools.product(KINDS, (False, True))]
QUICK = [("sampler, generator", True), ("replay", True), ("stateful", False)]


class Again:
    """A list of batches will do; there is no len() to ask for."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor([[n, 0.0, 0.0, 0.0]] * BATCH) for n in range(STEPS))


def check(kind: str, make: Make, *every_stop: tuple[str, ...]) -> list[Any]:
    """The same run with each of these stops as without one; what it sees."""
    assert position_of(make()).name == kind.split(",")[0]
    expected = run(make)
    for stops in every_stop:
        assert_same(expected, run(make, *stops))
    return expected[0]


def assert_every_sample_once(log: list[Any]) -> None:
    """In each epoch, and in another order in each."""
    seen = samples(log)
    epochs = [seen[first : first + SAMPLES] for first in range(0, EPOCHS * SAMPLES, SAMPLES)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * EPOCHS


@SKIPPED
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_at_every_moment_without_workers(kind: str) -> None:
    """Each moment as the only stop, and all of them one after the other: the same run."""
    moments = dict.fromkeys((*STOPS, *(f"step {n}" for n in range(1, EPOCHS * STEPS + 1))))
    each = [(moment,) for moment in moments]
    log = check(kind, lambda: KINDS[kind](Augmented()), STOPS, *each)
    if kind != "replay, any iterable":
        assert_every_sample_once(log)


@SKIPPED
@pytest.mark.parametrize(
    ("kind", "persistent"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.long)
        for one in WORKERS
        if one[0] not in ("replay, any iterable", "replay, stream") and not one[0].endswith(ALONE)
    ],
)
def test_stopped_often_with_workers(kind: str, persistent: bool) -> None:
    """Two workers that fetch ahead, kept or made anew in each epoch: the same run."""

    def two() -> Any:
        data = Augmented() if kind.startswith("replay") else seeded()
        return KINDS[kind](data, num_workers=2, persistent_workers=persistent)

    assert_every_sample_once(check(kind, two, STOPS[1::2]))


@SKIPPED
@pytest.mark.parametrize(
    ("kind", "make", "stops"),
    [
        # each sample is a batch of one
        (
            "sampler",
            lambda: DataLoader(Augmented(), batch_size=None, sampler=order()),
            ("step 2", "step 21", "step 22", "end 0", "step 40"),
        ),
        # where the number of samples in a batch cannot be computed, nothing is guessed
        (
            "replay",
            lambda: DataLoader(Augmented(), batch_sampler=Halves(order(), BATCH, False)),
            ("step 3", "step 5", "end 1"),
        ),
        ("stateful", lambda: stateful(CountedStream()), STOPS),
        ("stateful", lambda: stateful(CountedStream(), num_workers=2), STOPS[::3]),
    ],
    ids=["without batches", "odd batches", "counted stream", "counted stream, workers"],
)
@pytest.mark.filterwarnings("ignore:.*whose random numbers start anew")
def test_other_loaders(kind: str, make: Make, stops: tuple[str, ...]) -> None:
    """The same run, whatever the batches are; a stream with a state keeps its own place."""
    check(kind, make, stops)


@SKIPPED
@pytest.mark.long
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


def test_what_it_costs_is_said() -> None:
    """By one of several ranks: the batches that a replay fetches again, and what would spare them;
    data that workers augment without a seed; a sampler whose generator cannot be put back."""
    with pytest.warns(UserWarning, match=r"wrap it: SeededDataset\(dataset\)") as seen:
        run(lambda: sampled(Augmented(), num_workers=2), "step 2")
    assert any("start anew" in str(one.message) for one in seen)
    with pytest.warns(UserWarning, match=r"2 batches .*ResumableSampler.*StatefulDataLoader"):
        run(lambda: KINDS["replay"](Augmented()), "step 2")
    with pytest.warns(UserWarning, match=r"fetched again .*\. Shuffled has to give the same order"):
        run(lambda: DataLoader(Augmented(), BATCH, sampler=Shuffled()), "step 2")
    with pytest.warns(UserWarning, match=r"Shuffled draws from Shuffled\.python .* others never"):
        position_of(stateful(Augmented(), sampler=Shuffled())).begin_epoch(0)
    said = []
    for rank in (0, 1):
        position = position_of(KINDS["replay"](Augmented()), rank=rank, world_size=2)
        next(position.begin_epoch(0))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            position.resume_epoch(position.state_dict())
        said.append(sum("fetched again" in str(one.message) for one in seen))
    assert said == [1, 0]


def begun(loader: Any, batches: int = 1) -> Any:
    """The state of a position after so many batches."""
    position = position_of(loader)
    rest = position.begin_epoch(0)
    for _ in range(batches):
        next(rest)
    return position.state_dict()


@SKIPPED
def test_what_does_not_fit_is_refused() -> None:
    """A loader that ends before the position, an order of another length, a position of another
    kind or form, other generators, and other workers where torchdata would fail."""
    state = begun(sampled(Augmented()))
    shorter = DataLoader(Augmented(), BATCH, sampler=ResumableSampler(21, seed=1))
    workers = stateful(seeded(), num_workers=2)
    for told, loader, wanted in (
        (begun([1, 2, 3], 2), [1], r"2 batches .* ended after 1"),
        (state, shorter, "length was 22 and is 21"),
        (state, stateful(Augmented()), r"'sampler'.*'stateful'"),
        ({**state, "format": 2}, sampled(Augmented()), "format"),
        (state, sampled(Augmented(), generator=generator()), r"had generators .* \['loader'\]"),
        (begun(stateful(Augmented())), workers, "num_workers=0, now it has 2"),
    ):
        with pytest.raises(StateMismatch, match=wanted):
            position_of(loader).resume_epoch(told)


class Pathological(Augmented):
    def state_dict(self) -> dict[str, Any]:
        return {"file": [random.Random()]}

    def load_state_dict(self, state: Any) -> None: ...


def test_what_cannot_have_a_position() -> None:
    """Batches in the order in which workers finish, and things that are no loader; an object in a
    loader's state is refused with its place and type."""
    with pytest.raises(UsageError, match="in_order"):
        position_of(sampled(seeded(), num_workers=2, in_order=False))
    with pytest.raises(UsageError, match="int"):
        position_of(3)
    with pytest.raises(UnsavableState, match=r"dataset_state\.file\[0\] is a random\.Random"):
        begun(stateful(Pathological()))
