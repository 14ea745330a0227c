"""What changes in the objects of a script: found, brought back by its path, or named."""

from __future__ import annotations

import enum
import functools
import itertools
import random
import types
import weakref
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    WeightedRandomSampler,
    random_split,
)

from hydroslurm.checkpoint import census as census_module
from hydroslurm.checkpoint import walk
from hydroslurm.checkpoint.census import Census, equal
from hydroslurm.checkpoint.tree import decode, encode
from hydroslurm.checkpoint.walk import Variables


def through_a_checkpoint(state: Any) -> Any:
    return decode(*encode(state, prefix="state"))


def noted(thing: Any, **options: Any) -> Census:
    found = Census({"it": thing}, **options)
    found.note()
    return found


def model_noted(model: torch.nn.Module, **options: Any) -> Census:
    found = Census({}, models={"model": model}, **options)
    found.note()
    return found


def changed(census: Census, path: str = "it") -> dict[Any, Any]:
    """The values that would be saved of one object."""
    return {name: value for name, (value, _) in census.state().get(path, {}).items()}


class Box(SimpleNamespace):
    """An object of a script's own."""


class Slotted:
    __slots__ = ("count", "mean", "unset")

    def __init__(self) -> None:
        self.count, self.mean = 0, 0.0


class Hidden:
    """One whose properties and conversions must not be called."""

    def __init__(self) -> None:
        vars(self).update(count=0, _real=1)

    @property
    def real(self) -> int:
        raise AssertionError("user code was called")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"user code was called for {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError("user code was called")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("user code was called")

    __hash__ = None  # type: ignore[assignment]


class Asked(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("user code was called")


# --- where state lives: how it is made, what a step does, what to look at, and the path
# ------------------------------------------------------------------------------------------------


class Noise:
    def __init__(self) -> None:
        self.rng, self.calls = random.Random(1), 0

    def __call__(self, sample: Any) -> Any:
        self.calls += 1
        return sample + self.rng.random()

    def collate(self, samples: Any) -> Any:
        return [self(one) for one in samples]


class Samples(Dataset):
    def __init__(self) -> None:
        self.transform, self.level = Noise(), 1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


def closure() -> Callable[..., Any]:
    drawn, count = torch.Generator().manual_seed(1), 0

    def collate(samples: Any) -> Any:
        nonlocal count
        count += 1
        return torch.rand(1, generator=drawn), count

    return collate


def with_default(samples: Any, rng: Any = None) -> Any:
    return rng.random()


COUNTED = Counter[str]()


def counting(samples: Any) -> None:
    COUNTED["calls"] += 1
    counting.calls = getattr(counting, "calls", 0) + 1  # type: ignore[attr-defined]


def loader(**options: Any) -> DataLoader:
    return DataLoader(Samples(), batch_size=2, **options)


def teachers() -> Box:
    return Box(hidden=[torch.nn.Linear(2, 2)], by_name={"ema": torch.nn.BatchNorm1d(2)})


def follow(box: Box) -> None:
    box.hidden[0].weight.data.mul_(2)
    box.by_name["ema"].running_mean += 1


PLACES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "a transform's generator": (loader, list, "it.dataset.transform: calls, rng"),
    "a data set in another": (
        lambda: DataLoader(Subset(ConcatDataset([Samples(), Samples()]), [0, 5])),
        list,
        "it.dataset.dataset.datasets[0].transform: calls, rng; "
        "it.dataset.dataset.datasets[1].transform: calls, rng",
    ),
    "a curriculum": (
        loader, lambda one: setattr(one.dataset, "level", 2), "it.dataset: level",
    ),
    "weights of a sampler": (
        lambda: loader(sampler=WeightedRandomSampler(torch.ones(4), 4)),
        lambda one: one.sampler.weights.__setitem__(2, 5.0),
        "it.sampler: weights",
    ),
    "a generator of a sampler": (
        lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda one: torch.rand(1, generator=one.generator),
        "it: generator",
    ),
    "a collate function's closure": (
        lambda: loader(collate_fn=closure()),
        list,
        "it.collate_fn: count, drawn; it.dataset.transform: calls, rng",
    ),
    "a bound method": (
        lambda: DataLoader([1, 2], collate_fn=Noise().collate), list, "it.collate_fn: calls, rng",
    ),
    "a partial": (
        lambda: loader(collate_fn=functools.partial(with_default, rng=random.Random(1))),
        list,
        "it.collate_fn: rng; it.dataset.transform: calls, rng",
    ),
    "an object without a dict": (
        Slotted, lambda one: setattr(one, "count", 3), "it: count",
    ),
    "an object that must not be asked": (
        Hidden, lambda one: vars(one).update(count=1), "it: count",
    ),
    "a tensor that must not be asked": (
        lambda: Box(odd=torch.zeros(2).as_subclass(Asked), n=0),
        lambda one: setattr(one, "n", 1),
        "it: n",
    ),
    "teachers in a list and a dict": (
        teachers, follow, "it.by_name['ema']: running_mean; it.hidden[0]: weight",
    ),
    "numpy's generators": (
        lambda: {"new": np.random.default_rng(1), "old": [np.random.RandomState(1)]},
        lambda one: (one["new"].random(), one["old"][0].rand()),
        "it: new; it['old']: 0",
    ),
    "an average in a dict": (
        lambda: Box(ema={"w": torch.zeros(2)}), lambda one: one.ema["w"].add_(1), "it: ema",
    ),
    "meters by name": (
        lambda: {"loss": Slotted(), "top1": Box(sum=0.0)},
        lambda one: (setattr(one["loss"], "count", 1), setattr(one["top1"], "sum", 0.5)),
        "it['loss']: count; it['top1']: sum",
    ),
    "what a class counts": (
        lambda: Marked(count=0), lambda _: Marked.seen.append(1), f"{__name__}().Marked: seen",
    ),
    "a default": (
        lambda: functools.partial(kept_by_default, []), lambda one: one(), "it.func's defaults: 0",
    ),
    "arguments of a partial": (
        lambda: functools.partial(list.append, []), lambda one: one(1), "it.args: 0",
    ),
    "what is in a tuple": (
        lambda: Box(pair=(Noise(), {"n": 0})),
        lambda one: one.pair[1].update(n=1),
        "it.pair: 1",
    ),
    "a member of an enum": (
        lambda: Box(phase=Phase.WARM), lambda one: setattr(one, "phase", Phase.MAIN), "it: phase",
    ),
    "objects by member": (
        lambda: {Phase.WARM: Slotted()},
        lambda one: setattr(one[Phase.WARM], "count", 2),
        "it[WARM]: count",
    ),
    "named tuples": (
        lambda: Box(best=Point(0.5, 1), all=[Point(0.5, Phase.WARM)]),
        lambda one: (setattr(one, "best", Point(0.2, 3)), one.all.append(Point(1.0, None))),
        "it: all, best",
    ),
    "a namespace in a class of dict": (
        lambda: Config(rate=0.1), lambda one: one.update(rate=0.2), "it: rate",
    ),
}  # fmt: skip


class Marked(Box):
    seen: ClassVar[list[int]] = []


class Phase(enum.Enum):
    WARM, MAIN = 1, 2


Point = namedtuple("Point", "loss step")


def kept_by_default(more: list[int], all: list[int] = []) -> None:  # noqa: B006
    all.append(1)


class Config(dict):  # type: ignore[type-arg]
    """As those of many scripts: its entries are its attributes."""


@pytest.mark.parametrize("place", PLACES)
def test_where_state_is_found(place: str) -> None:
    """And comes back there, in place, while what did not change is not saved."""
    make, step, wanted = PLACES[place]
    one, again = make(), make()
    before, after = noted(one), noted(again)
    assert before.state() == {}
    step(one)
    state = before.state()
    found = {path: ", ".join(map(str, sorted(state[path]))) for path in sorted(state)}
    assert "; ".join(f"{path}: {names}" for path, names in found.items()) == wanted
    assert after.restore(through_a_checkpoint(state)) == {}
    assert equal(values_of(after), values_of(before))
    assert not before.unkept()


def values_of(census: Census) -> dict[str, Any]:
    return {path: changed(census, path) for path in census.state()}


def test_attributes_and_globals_of_a_function() -> None:
    COUNTED.clear()
    vars(counting).clear()
    one = noted(counting)
    counting([])
    state = one.state()
    assert {path: sorted(names) for path, names in state.items()} == {
        "it's attributes": ["calls"],
        f"{__name__}()": ["COUNTED"],
    }
    COUNTED.clear()
    one.restore(through_a_checkpoint(state))
    assert COUNTED == {"calls": 1}


# --- values
# ------------------------------------------------------------------------------------------------


def attempt() -> tuple[Box, Census]:
    """What a script makes in each attempt."""
    one = Box(
        fixed=3, words=["a"], outputs=[], count=0, best=None, seen={1}, recent=deque([0.5], 2),
        by_epoch={0: (1, 2.5)}, scores=np.zeros(2), mean=torch.zeros(2), rank=None, began=None,
    )  # fmt: skip
    return one, noted(one)


def test_what_has_changed_comes_back() -> None:
    """In the same types; what has not changed is as the script makes it."""
    before, saved = attempt()
    saved.begin()
    before.outputs.append((torch.ones(1, requires_grad=True) * 2, 4))
    before.count, before.best, before.seen, before.new = 7, "step-7", {1, 2}, np.float32(0.5)
    before.recent.extend([1.5, 2.5])
    before.by_epoch[1] = (3, 4.5)
    before.scores[1] = 1.0
    before.mean += 1
    state = saved.state()
    assert not any("early" in marks for _, marks in state["it"].values())
    after, loaded = attempt()
    mean = after.mean
    loaded.restore(through_a_checkpoint(state))
    for name, value in vars(before).items():
        assert equal(getattr(after, name), value), name
        assert type(getattr(after, name)) is type(value), name
    assert not after.outputs[0][0].requires_grad
    assert (after.recent.maxlen, after.mean is mean, after.fixed) == (2, True, 3)
    assert "fixed" not in state["it"]
    assert loaded.state()["it"].keys() == state["it"].keys()


@pytest.mark.parametrize("is_resized", [False, True])
def test_what_an_attempt_sets_before_its_first_step(is_resized: bool) -> None:
    """A time or a folder is its own, and with another number of ranks all of it, such as a rank;
    but what it has not set, because its first epoch had begun before, comes back, and so does what
    has changed in any attempt since a first step."""
    one, census = attempt()
    one.rank, one.began, one.best, one.count, one.folder = 1, 0.5, 0.5, 1, "/tmp/1"
    census.begin()
    one.count = 2
    for rank in (2, 3):
        saved = through_a_checkpoint(census.state())
        early = {name for name, (_, marks) in saved["it"].items() if "early" in marks}
        assert early == {"began", "best", "folder", "rank"}
        one, census = attempt()
        one.rank, one.began, one.count, one.folder = rank, rank + 0.5, 1, f"/tmp/{rank}"
        census.restore(saved, is_resized=is_resized)
        census.begin()
        assert one.rank == (rank if is_resized else 1)
        assert (one.began, one.best, one.count) == (rank + 0.5, 0.5, 2)
        assert one.folder == f"/tmp/{rank}"


def test_a_new_rank_draws_numbers_of_its_own() -> None:
    one, again = Noise(), Noise()
    before, after = noted(one), noted(again)
    one(0)
    after.restore(through_a_checkpoint(before.state()), new_rank=2)
    assert again.rng.random() != one.rng.random()


@pytest.mark.parametrize(
    ("large", "change"),
    [
        (list(range(20_000)), lambda one: one.append(1)),
        (list(range(20_000)), random.Random(0).shuffle),
        (torch.zeros(300_000), lambda one: one.add_(1)),
        (torch.zeros(300_000), lambda one: one.data.add_(1)),
        (np.zeros(300_000), lambda one: one.fill(1)),
        (np.zeros(3_000_000), lambda one: one.__setitem__(slice(2_000), 1)),
        (dict.fromkeys(range(20_000), 0.5), lambda one: one.update(more=1)),
    ],
)
def test_large_ones_are_saved_only_if_they_change(large: Any, change: Callable[[Any], Any]) -> None:
    """A vocabulary is told by its length and a sample, an array by its bytes, a tensor by torch's
    own count and a sample."""
    one = Box(large=large)
    census = noted(one)
    assert census.state() == {}
    change(large)
    assert changed(census).keys() == {"large"}


def test_what_is_in_a_large_list_is_not_looked_at() -> None:
    one = Box(items=[Noise() for _ in range(20_000)])
    census = noted(one)
    one.items.append(Noise())
    assert census.state() == {}


def test_what_an_optimizer_has_stays() -> None:
    """Leaves that are trained and are no parameters, as in a search for an architecture."""

    def made() -> tuple[Box, Census]:
        alpha = torch.zeros(2, requires_grad=True)
        one = Box(alpha=alpha, all=[alpha, 0], by_name={"alpha": alpha})
        return one, noted(one)

    before, saved = made()
    before.alpha.data += 1
    before.all = [before.alpha, 1]
    after, loaded = made()
    alpha = after.alpha
    loaded.restore(through_a_checkpoint(saved.state()))
    assert after.alpha is after.all[0] is after.by_name["alpha"] is alpha
    assert alpha.requires_grad
    assert (alpha.tolist(), after.all[1]) == ([1, 1], 1)


def test_others_have_the_same_object() -> None:
    """What is in a list that a router's blocks share comes back into it; one that took the place of
    another does not: that may be a constant of the script."""
    constant, many = torch.zeros(1), [0]

    def made() -> tuple[Box, Census]:
        one = Box(
            losses=[], recent=deque(maxlen=2), seen=set(), tensor=constant, many=many,
            wide=torch.zeros(1).expand(4),
        )  # fmt: skip
        return one, noted(one)

    before, saved = made()
    before.losses.append(1.0)
    before.recent.extend([1, 2, 3])
    before.seen.add("a")
    before.tensor, before.many, before.wide = torch.ones(1), [1, 2], torch.ones(1).expand(4)
    after, loaded = made()
    shared = (after.losses, after.recent, after.seen)
    loaded.restore(through_a_checkpoint(saved.state()))
    assert shared == ([1.0], deque([2, 3], 2), {"a"})
    now = (after.losses, after.recent, after.seen)
    assert all(one is other for one, other in zip(shared, now, strict=True))
    assert (after.tensor.item(), after.many, after.wide.tolist()) == (1, [1, 2], [1, 1, 1, 1])
    assert (constant.item(), many) == (0, [0])


def test_what_would_not_come_back_as_it_is() -> None:
    """Sparse tensors, enums, named tuples: left out, without an error."""
    Pair = namedtuple("Pair", "loss number")

    class Mode(str, enum.Enum):
        NEXT = "next"

    adjacency = torch.eye(2).to_sparse()
    one = Box(adjacency=adjacency, mode=None, last=None, cache={}, where=None)
    census = noted(one)
    one.adjacency, one.mode, one.last = adjacency * 2, Mode.NEXT, Pair(1.0, 2)
    one.cache = {(Mode, 1): 2.0}
    one.masked = np.ma.masked_array([1.0], [True])
    one.where, one.lru, one.counts = torch.device("cpu"), OrderedDict(a=1), Counter("aa")
    one.by_form = {(3, torch.float32, torch.device("cpu")): torch.ones(1)}
    values = {n: v for n, (v, _) in through_a_checkpoint(census.state())["it"].items()}
    assert values.keys() == {"where", "lru", "counts", "by_form"}
    assert isinstance(values["lru"], OrderedDict)
    assert values["counts"]["b"] == 0


def test_a_tensor_of_another_type_has_changed() -> None:
    one = Box(mask=torch.ones(2))
    census = noted(one)
    one.mask = one.mask.double()
    assert changed(census)["mask"].dtype == torch.float64


def test_a_tensor_of_an_evaluation_does_not_count_its_changes() -> None:
    with torch.inference_mode():
        one = Box(cache=torch.zeros(300_000))
    census = noted(one)
    assert census.state() == {}
    with torch.inference_mode():
        one.cache.add_(1)
    assert changed(census).keys() == {"cache"}


# --- modules
# ------------------------------------------------------------------------------------------------


def test_modules_of_the_scripts_own() -> None:
    """A pointer into a queue; not what torch's own modules have."""

    class Queue(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pointer, self.dropout = 0, torch.nn.Dropout(0.1)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Queue())
    census = model_noted(model)
    model[1].pointer = 5
    model.eval()
    assert values_of(census) == {"model.1": {"pointer": 5}}


@pytest.mark.parametrize("kind", [torch.nn.ParameterDict, torch.nn.ParameterList, torch.nn.Module])
def test_parameters_that_a_module_of_no_state_dict_gets_later(kind: Any) -> None:
    """Prototypes that a loop adds to its own memory."""

    def add(module: Any, value: float) -> None:
        made = torch.nn.Parameter(torch.full((2,), value))
        if kind is torch.nn.ParameterList:
            module.append(made)
        elif kind is torch.nn.ParameterDict:
            module[f"class {value:g}"] = made
        else:
            module.register_parameter(f"class {value:g}", made)

    before, after = kind(), kind()
    for one in (before, after):
        add(one, 1.0)
    census, again = noted(before), noted(after)
    add(before, 2.0)
    add(before, 3.0)
    assert again.restore(census.state()) == {}
    expected = {name: one.tolist() for name, one in before.named_parameters()}
    assert {name: one.tolist() for name, one in after.named_parameters()} == expected
    if kind is not torch.nn.Module:
        assert len(after) == len(before) == 3


@pytest.mark.parametrize(
    ("make", "change", "named"),
    [
        (lambda: [Box(), 1], lambda it: it.append(2), False),
        (lambda: [Box(), 1], lambda it: it.pop(), True),
        (lambda: [Box()], lambda it: it.append(Box()), True),
        (lambda: deque([Box()]), lambda it: it.clear(), True),
        (lambda: {"a": Box(), "b": 1}, lambda it: it.pop("b"), True),
        (lambda: {"a": Box()}, lambda it: it.update(b=Box()), True),
        (lambda: torch.nn.ModuleList([torch.nn.ReLU()]), lambda it: it.append(it[0]), True),
        (lambda: torch.nn.ModuleDict({"a": torch.nn.ReLU()}), lambda it: it.pop("a"), True),
        (lambda: torch.nn.ParameterDict({"a": torch.ones(1)}), lambda it: it.pop("a"), True),
    ],
)
def test_what_is_put_into_collections_of_objects(
    make: Callable[[], Any], change: Callable[[Any], Any], named: bool
) -> None:
    """The next attempt has the objects that the script makes: those that are more or fewer are
    named, and a value behind them comes back."""
    before, after = make(), make()
    census, again = noted(before), noted(after)
    census.begin()
    change(before)
    saved = census.state()
    said = [str(one) for one in census.unkept()]
    assert [one.rpartition(") ")[2] for one in said] == [census_module._LOST] * named, said
    assert again.restore(saved) == {}
    assert named or after[1:] == before[1:]


def test_tensors_come_back_to_the_device_of_the_model() -> None:
    """A list of losses that were on the device: it is not there yet in the next attempt."""
    one = Box(losses=[])
    census = noted(one, device=lambda: torch.device("meta"))
    saved = {"losses": ([torch.ones(1)], ["on device"]), "count": (torch.ones(2), [])}
    census.restore({"it": saved})
    assert [each.device.type for each in (*one.losses, one.count)] == ["meta", "cpu"]


def test_how_modules_are_set() -> None:
    """What is trained, probabilities and modes; what has not changed is as the script makes it."""

    def made() -> tuple[torch.nn.Sequential, Census]:
        model = torch.nn.Sequential(
            torch.nn.Linear(2, 2), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(2)
        )
        model[0].requires_grad_(False)
        return model, model_noted(model)

    before, saved = made()
    assert saved.state() == {}
    before[0].weight.requires_grad_(True)
    before[1].p = 0.1
    before[2].eval()
    after, loaded = made()
    loaded.restore(through_a_checkpoint(saved.state()))
    assert [one.requires_grad for one in after.parameters()] == [True, False, True, True]
    assert (after[1].p, [one.training for one in after]) == (0.1, [True, True, False])
    after[2].train()  # as it was made, but not as it was saved
    assert values_of(loaded) == {
        "model.1": {"p": 0.1},
        "model.2": {"training": True},
        "model.0": {"weight.requires_grad": True},
    }


def test_an_evaluation_is_not_the_training() -> None:
    """A stop within it: the modes are those of the training, with a norm that it had left fixed."""

    def made() -> tuple[torch.nn.Sequential, Census]:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.3))
        return model, model_noted(model)

    before, saved = made()
    before[0].eval()
    in_training = values_of(saved)
    assert in_training == {"model.0": {"training": False}}
    before.eval()
    before[1].p = 0.1
    state = saved.state()
    assert values_of(saved) == {**in_training, "model.1": {"p": 0.1}}
    after, loaded = made()
    loaded.restore(through_a_checkpoint(state))
    after.eval()
    assert values_of(loaded) == values_of(saved)  # of a second stop in the evaluation


def test_weights_that_an_attribute_shows_stay_weights() -> None:
    """A list of weights to be penalised, what an LSTM computes with, a view of a weight or a
    buffer: those that came back instead would be trained by nobody."""

    class Recurrent(torch.nn.LSTM):
        pass

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.norm = Recurrent(2, 2), torch.nn.BatchNorm1d(2)
            self.penalised = list(self.rnn.parameters())
            self.view, self.means = self.rnn.weight_ih_l0.data, {"mean": self.norm.running_mean}

    net, shown = Net(), Box()
    shown.weights = list(net.parameters())
    census = Census({"shown": shown, "net": net}, models={"model": net})
    census.note()
    with torch.no_grad():
        for one in (*net.parameters(), *net.buffers()):
            one.add_(1)
    assert census.state() == {}


def test_buffers_that_are_not_persistent_come_with_what_is_said_of_them() -> None:
    """A table of positions that grows, and how long it is; in a module of torch's as well."""

    class Positions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grow(2)

        def grow(self, length: int) -> None:
            self.length = length
            self.register_buffer("table", torch.arange(length), persistent=False)

    def made() -> tuple[torch.nn.Module, Census]:
        model = torch.nn.Sequential(Positions(), torch.nn.Linear(1, 1))
        model[1].register_buffer("count", torch.zeros(1), persistent=False)
        return model, model_noted(model)

    before, saved = made()
    assert saved.state() == {}
    before[0].grow(5)
    before[0].register_buffer("more", torch.ones(1), persistent=False)
    before[1].count += 1
    before[1].table = object()  # not of a class of the script
    after, loaded = made()
    loaded.restore(through_a_checkpoint(saved.state()))
    assert (after[0].length, len(after[0].table), after[1].count.item()) == (5, 5, 1)
    assert not hasattr(after[1], "table")
    assert after.state_dict().keys() == made()[0].state_dict().keys()
    assert {name for name, _ in after.named_buffers()} == {"0.table", "0.more", "1.count"}


def test_a_parametrized_module_is_the_scripts_own() -> None:
    class Own(torch.nn.Linear):
        scale = 1.0

    model = torch.nn.Sequential(Own(2, 2), torch.nn.Linear(2, 2))
    for one in model:
        torch.nn.utils.parametrizations.spectral_norm(one)
    census = model_noted(model)
    model[0].scale = 0.5
    model[0].rates = [0.5]
    model[1].rates = [0.5]
    assert values_of(census) == {"model.0": {"scale": 0.5, "rates": [0.5]}}


def test_no_storage_is_exported() -> None:
    """Observers of torch.ao resize their buffers, which torch refuses once numpy shares them."""
    model = torch.nn.BatchNorm1d(2)
    box = Box(model=model, free=torch.zeros(0), seen=torch.zeros(3))
    census = noted(box)
    census.begin()
    census.state()
    for one in (box.free, box.seen, model.running_mean):
        one.resize_(100)
    assert changed(census).keys() == {"free", "seen"}


LOST = "has changed and cannot be saved: the next attempt begins without that"
MOVED = "is an iterator that has moved, and nothing can bring it back to its place"

# --- what cannot come back
# ------------------------------------------------------------------------------------------------


Local = enum.Enum("Local", "A B", qualname="function.<locals>.Local")


def endless() -> Any:
    numbers = iter(range(100))
    while True:
        yield next(numbers)


def passing() -> Any:
    while True:
        yield from range(100)


def mapping() -> Any:
    for _ in range(100):
        yield random.random()


def waits() -> Any:
    while True:
        yield random.random()


@pytest.mark.parametrize(
    ("make", "step", "said"),
    [
        (lambda: Box(it=["a"]), lambda one: setattr(one, "it", object()), f"(object) {LOST}"),
        (lambda: Box(it={1}), lambda one: one.it.add(object()), f"(set) {LOST}"),
        (lambda: Box(it=endless()), lambda one: next(one.it), f"(generator) {MOVED}"),
        (lambda: Box(it=passing()), lambda one: next(one.it), f"(generator) {MOVED}"),
        (lambda: Box(it=mapping()), lambda one: next(one.it), f"(generator) {MOVED}"),
        (lambda: Box(it=iter([1, 2])), lambda one: next(one.it), f"(list_iterator) {MOVED}"),
        (lambda: Box(it=zip("ab", "cd", strict=True)), lambda one: next(one.it), f"(zip) {MOVED}"),
        (lambda: Box(it=enumerate("ab")), lambda one: next(one.it), f"(enumerate) {MOVED}"),
        (lambda: Box(it=itertools.cycle("ab")), lambda one: next(one.it), f"(cycle) {MOVED}"),
        (lambda: Box(it=waits()), lambda one: next(one.it), ""),
        (lambda: Box(it=None), lambda one: setattr(one, "it", open), ""),
        (lambda: Box(it=np.zeros(2, "i4,f4")), lambda one: one.it.fill(1), f"(ndarray) {LOST}"),
        (lambda: Box(it=torch.eye(2).to_sparse()), lambda one: one.it.mul_(2), f"(Tensor) {LOST}"),
        (lambda: Box(it=Local.A), lambda one: setattr(one, "it", Local.B), f"(Local) {LOST}"),
    ],
)
def test_what_is_named(make: Callable[[], Any], step: Callable[[Any], Any], said: str) -> None:
    """Once, with its path; nothing where nothing of the script's would be missed."""
    one = make()
    if isinstance(one.it, types.GeneratorType):
        next(one.it)
    census = noted(one)
    step(one)
    assert [str(each) for each in census.unkept()] == ([f"it.it {said}"] if said else [])
    assert not census.unkept()


def test_a_flag_beside_an_object_that_the_first_step_has_made() -> None:
    """It would keep the next attempt from making it again."""
    one = Box(is_ready=False, is_warm=False, file=None, steps=0)
    census = noted(one)
    one.is_ready, one.file = True, weakref.WeakSet()
    assert [str(each) for each in census.unkept()] == [
        "it.file (WeakSet) has changed and cannot be saved: the next attempt begins without that",
        "it.is_ready (True) says that file is there, which the next attempt has to make again: it "
        "is not saved",
    ]
    one.is_warm, one.steps = True, 3
    assert changed(census) == {"is_warm": True, "steps": 3}


def test_the_walk_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says where."""
    monkeypatch.setattr(walk, "MOST_OBJECTS", 50)
    census = noted(Box(children=[Box(children=[Noise() for _ in range(30)]) for _ in range(9)]))
    (limit,) = census.unkept()
    assert str(limit).startswith("it.children[")
    assert "is where the look for state has ended, behind 51 objects" in str(limit)


def test_what_others_save_and_what_is_of_a_library() -> None:
    """Neither is looked into, nor are files, clocks and locks."""
    shared = Noise()
    one = Box(
        shared=shared, path=weakref.WeakSet(), optimizer=torch.optim.SGD([torch.zeros(1)], 0.1)
    )
    census = noted(one, saved=lambda: [Box(deep=[shared, 1])])
    shared(0)
    one.optimizer.param_groups[0]["lr"] = 1.0
    assert census.state() == {}
    assert not census.unkept()


def test_variables_are_roots() -> None:
    """A second look notes only what is new, and an object that is not there yet is waited for."""
    space = {"best": 1.0, "meter": Slotted(), "rates": [0.1]}
    census = Census(lambda: {"train()": Variables(space, space.__setitem__)})
    census.note()
    space["best"], space["meter"].count = 0.5, 3
    state = through_a_checkpoint(census.state())
    assert {path: sorted(names) for path, names in state.items()} == {
        "train()": ["best"], "train().meter": ["count"],
    }  # fmt: skip
    again: dict[str, Any] = {}
    later = Census(lambda: {"train()": Variables(again, again.__setitem__)})
    assert later.restore(state).keys() == {"train().meter"}
    assert again == {"best": 0.5}


def test_global_generators_are_the_positions_matter() -> None:
    """Whoever imports random_split has torch's as a default of it; put back twice, it would undo
    what was drawn between."""
    mine = Box()
    mine.torch, mine.numpy = torch.default_generator, np.random.mtrand._rand
    mine.python = random.random.__self__
    mine.split = random_split
    census = noted(mine)
    torch.rand(1), np.random.rand(), random.random()
    assert not census.state()
