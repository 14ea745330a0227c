"""What is saved of the attributes of a script's own objects."""

from __future__ import annotations

import enum
import weakref
from collections import Counter, OrderedDict, deque, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hydroslurm.checkpoint.plain import equal
from hydroslurm.checkpoint.tree import decode, encode
from hydroslurm.training import attributes, plain, script_state
from hydroslurm.training.attributes import Attributes, of_modules
from hydroslurm.training.module_settings import ModuleSettings
from hydroslurm.training.script_state import ScriptState


def through_a_checkpoint(state: Any) -> Any:
    return decode(*encode(state, prefix="state"))


def attempt(**options: Any) -> tuple[SimpleNamespace, Attributes]:
    """What a script makes in each attempt."""
    one = SimpleNamespace(
        fixed=3, words=["a"], outputs=[], count=0, best=None, seen={1}, recent=deque([0.5], 2),
        by_epoch={0: (1, 2.5)}, scores=np.zeros(2), mean=torch.zeros(2), rank=None, began=None,
    )  # fmt: skip
    found = Attributes(one, **options)
    found.remember()
    return one, found


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
    state = saved.state_dict()
    assert state["early"] == []
    after, loaded = attempt()
    mean = after.mean
    loaded.load_state_dict(through_a_checkpoint(state))
    for name, value in vars(before).items():
        assert equal(getattr(after, name), value), name
        assert type(getattr(after, name)) is type(value), name
    assert not after.outputs[0][0].requires_grad
    assert (after.recent.maxlen, after.mean is mean, after.fixed) == (2, True, 3)
    assert "fixed" not in state["values"]
    assert loaded.state_dict()["values"].keys() == state["values"].keys()


@pytest.mark.parametrize("is_resized", [False, True])
def test_what_an_attempt_sets_before_its_first_step(is_resized: bool) -> None:
    """A time or a folder is its own, and with another number of ranks all of it, such as a rank;
    but what it has not set, because its first epoch had begun before, comes back, and so does what
    has changed in any attempt since a first step."""
    one, state = attempt()
    one.rank, one.began, one.best, one.count, one.folder = 1, 0.5, 0.5, 1, "/tmp/1"
    state.begin()
    one.count = 2
    for rank in (2, 3):
        saved = through_a_checkpoint(state.state_dict())
        assert saved["early"] == ["began", "best", "folder", "rank"]
        one, state = attempt()
        one.rank, one.began, one.count, one.folder = rank, rank + 0.5, 1, f"/tmp/{rank}"
        state.load_state_dict(saved, is_resized=is_resized)
        state.begin()
        assert one.rank == (rank if is_resized else 1)
        assert (one.began, one.best, one.count) == (rank + 0.5, 0.5, 2)
        assert one.folder == f"/tmp/{rank}"


def test_what_is_left_out() -> None:
    """Objects, flags and tensors if they are not wanted, names that are not."""
    one, state = attempt(without=("count",), flags=False, tensors=False)
    one.count, one.best, one.mean, one.scores, one.outputs = 1, "a", one.mean + 1, one.scores + 1, 2
    one.seen, one.words = {object()}, object()
    assert state.state_dict()["values"] == {"outputs": 2}
    assert state.unsaved() == ["SimpleNamespace.seen (set)", "SimpleNamespace.words (object)"]


def test_large_ones_are_saved_only_if_they_change() -> None:
    """A vocabulary is told by its length, an array by its bytes, a tensor by torch's own count."""
    for large, change in (
        (list(range(20_000)), lambda one: one.append(1)),
        (torch.zeros(300_000), lambda one: one.add_(1)),
        (np.zeros(300_000), lambda one: one.fill(1)),
    ):
        one = SimpleNamespace(large=large)
        state = Attributes(one)
        state.remember()
        assert state.state_dict()["values"] == {}
        change(large)
        assert state.state_dict()["values"].keys() == {"large"}


def test_modules_of_the_scripts_own() -> None:
    """A pointer into a queue; not what torch's own modules have."""

    class Queue(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pointer, self.dropout = 0, torch.nn.Dropout(0.1)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Queue())
    found = of_modules(model)
    assert found.keys() == {"module 1"}
    found["module 1"].remember()
    model[1].pointer = 5
    model.eval()
    assert found["module 1"].state_dict()["values"] == {"pointer": 5}


def test_tensors_come_back_to_the_device_of_the_model() -> None:
    """A list of losses that were on the device: it is not there yet in the next attempt."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(1, device="meta"))
            self.losses: list[torch.Tensor] = []

    model = Model()
    found = of_modules(model)
    assert found.keys() == {"module "}
    found["module "].remember()
    values = {"losses": [torch.ones(1)], "count": torch.ones(2)}
    saved = {**found["module "].state_dict(), "values": values, "on_device": ["losses"]}
    found["module "].load_state_dict(saved)
    assert [one.device.type for one in (*model.losses, model.count)] == ["meta", "cpu"]


def test_how_modules_are_set() -> None:
    """What is trained, probabilities and modes; what has not changed is as the script makes it."""

    def made() -> tuple[torch.nn.Sequential, ModuleSettings]:
        model = torch.nn.Sequential(
            torch.nn.Linear(2, 2), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(2)
        )
        model[0].requires_grad_(False)
        settings = ModuleSettings(lambda: {0: model})
        settings.remember()
        return model, settings

    before, saved = made()
    assert saved.state_dict() == {}
    before[0].weight.requires_grad_(True)
    before[1].p = 0.1
    before[2].eval()
    after, loaded = made()
    loaded.load_state_dict(through_a_checkpoint(saved.state_dict()))
    assert [one.requires_grad for one in after.parameters()] == [True, False, True, True]
    assert (after[1].p, [one.training for one in after]) == (0.1, [True, True, False])
    after[2].train()  # as it was made, but not as it was saved
    assert loaded.state_dict() == {
        "0.1": {"p": 0.1},
        "0.2": {"training": True},
        "0.0.weight (parameter)": {"requires_grad": True},
    }


def test_an_evaluation_is_not_the_training() -> None:
    """A stop within it: the modes are those of the training, with a norm that it had left fixed."""

    def made() -> tuple[torch.nn.Sequential, ModuleSettings]:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.3))
        settings = ModuleSettings(lambda: {"model": model})
        settings.remember()
        return model, settings

    before, saved = made()
    before[0].eval()
    in_training = saved.state_dict()
    assert in_training == {"model.0": {"training": False}}
    before.eval()
    before[1].p = 0.1
    state = saved.state_dict()
    assert state == {**in_training, "model.1": {"p": 0.1}}
    after, loaded = made()
    loaded.load_state_dict(through_a_checkpoint(state))
    after.eval()
    assert loaded.state_dict() == state  # of a second stop in the evaluation


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

    def made() -> tuple[Net, dict[str, Attributes]]:
        net = Net()
        found = of_modules(net)
        for one in found.values():
            one.remember()
        return net, found

    net, found = made()
    with torch.no_grad():
        for one in (*net.parameters(), *net.buffers()):
            one.add_(1)
    assert not any(one.state_dict()["values"] for one in found.values())
    assert "module rnn" in found


def test_what_an_optimizer_has_stays() -> None:
    """Leaves that are trained and are no parameters, as in a search for an architecture."""

    def made() -> tuple[SimpleNamespace, Attributes]:
        alpha = torch.zeros(2, requires_grad=True)
        one = SimpleNamespace(alpha=alpha, all=[alpha, 0], by_name={"alpha": alpha})
        state = Attributes(one)
        state.remember()
        return one, state

    before, saved = made()
    before.alpha.data += 1
    before.all = [before.alpha, 1]
    after, loaded = made()
    alpha = after.alpha
    loaded.load_state_dict(through_a_checkpoint(saved.state_dict()))
    assert after.alpha is after.all[0] is after.by_name["alpha"] is alpha
    assert alpha.requires_grad
    assert alpha.tolist() == [1, 1]
    assert after.all[1] == 1


def test_others_have_the_same_object() -> None:
    """What is in a list that a router's blocks share comes back into it; one that took the place of
    another does not: that may be a constant of the script."""
    constant, many = torch.zeros(1), [0]

    def made() -> tuple[SimpleNamespace, Attributes]:
        one = SimpleNamespace(
            losses=[], recent=deque(maxlen=2), seen=set(), tensor=constant, many=many,
            wide=torch.zeros(1).expand(4),
        )  # fmt: skip
        state = Attributes(one)
        state.remember()
        return one, state

    before, saved = made()
    before.losses.append(1.0)
    before.recent.extend([1, 2, 3])
    before.seen.add("a")
    before.tensor, before.many, before.wide = torch.ones(1), [1, 2], torch.ones(1).expand(4)
    after, loaded = made()
    shared = (after.losses, after.recent, after.seen)
    loaded.load_state_dict(through_a_checkpoint(saved.state_dict()))
    assert shared == ([1.0], deque([2, 3], 2), {"a"})
    assert all(
        one is other
        for one, other in zip(shared, (after.losses, after.recent, after.seen), strict=True)
    )
    assert (after.tensor.item(), after.many, after.wide.tolist()) == (1, [1, 2], [1, 1, 1, 1])
    assert (constant.item(), many) == (0, [0])


def test_what_would_not_come_back_as_it_is() -> None:
    """Sparse and quantized tensors, enums, named tuples: left out, without an error."""
    Pair = namedtuple("Pair", "loss number")

    class Mode(str, enum.Enum):
        NEXT = "next"

    adjacency = torch.eye(2).to_sparse()
    one = SimpleNamespace(adjacency=adjacency, mode=None, last=None, cache={}, where=None)
    state = Attributes(one)
    state.remember()
    one.adjacency, one.mode, one.last = adjacency * 2, Mode.NEXT, Pair(1.0, 2)
    one.cache = {(Mode, 1): 2.0}
    one.masked = np.ma.masked_array([1.0], [True])
    one.where, one.lru, one.counts = torch.device("cpu"), OrderedDict(a=1), Counter("aa")
    one.by_form = {(3, torch.float32, torch.device("cpu")): torch.ones(1)}
    values = through_a_checkpoint(state.state_dict())["values"]
    assert values.keys() == {"where", "lru", "counts", "by_form"}
    assert isinstance(values["lru"], OrderedDict)
    assert values["counts"]["b"] == 0


def test_a_tensor_of_another_type_has_changed() -> None:
    one = SimpleNamespace(mask=torch.ones(2))
    state = Attributes(one)
    state.remember()
    one.mask = one.mask.double()
    assert state.state_dict()["values"]["mask"].dtype == torch.float64


def test_a_tensor_of_an_evaluation_does_not_count_its_changes() -> None:
    with torch.inference_mode():
        one = SimpleNamespace(cache=torch.zeros(300_000))
    state = Attributes(one)
    state.remember()
    assert state.state_dict()["values"] == {}
    with torch.inference_mode():
        one.cache.add_(1)
    assert state.state_dict()["values"].keys() == {"cache"}


def test_buffers_that_are_not_persistent_come_with_what_is_said_of_them() -> None:
    """A table of positions that grows, and how long it is; in a module of torch's as well."""

    class Positions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grow(2)

        def grow(self, length: int) -> None:
            self.length = length
            self.register_buffer("table", torch.arange(length), persistent=False)

    def made() -> tuple[torch.nn.Module, dict[str, Attributes]]:
        model = torch.nn.Sequential(Positions(), torch.nn.Linear(1, 1))
        model[1].register_buffer("count", torch.zeros(1), persistent=False)
        found = of_modules(model)
        for one in found.values():
            one.remember()
        return model, found

    before, saved = made()
    assert not any(one.state_dict()["values"] for one in saved.values())
    before[0].grow(5)
    before[0].register_buffer("more", torch.ones(1), persistent=False)
    before[1].count += 1
    before[1].scale = 2.0  # not of a class of the script
    after, loaded = made()
    for name, one in loaded.items():
        one.load_state_dict(through_a_checkpoint(saved[name].state_dict()))
    assert (after[0].length, len(after[0].table), after[1].count.item()) == (5, 5, 1)
    assert not hasattr(after[1], "scale")
    assert after.state_dict().keys() == made()[0].state_dict().keys()
    assert {name for name, _ in after.named_buffers()} == {"0.table", "0.more", "1.count"}


def test_a_flag_beside_an_object_that_the_first_step_has_made() -> None:
    """It would keep the next attempt from making it again."""
    one = SimpleNamespace(is_ready=False, is_warm=False, file=None, steps=0)
    state = Attributes(one)
    state.remember()
    one.is_ready, one.file = True, weakref.WeakSet()
    assert state.unsaved() == [
        "SimpleNamespace.file (WeakSet)",
        "SimpleNamespace.is_ready (True beside file)",
    ]
    state.leave_unsaved()
    one.is_warm, one.steps = True, 3
    assert state.state_dict()["values"] == {"is_warm": True, "steps": 3}


def test_a_parametrized_module_is_the_scripts_own() -> None:
    class Own(torch.nn.Linear):
        scale = 1.0

    model = torch.nn.Sequential(Own(2, 2), torch.nn.Linear(2, 2))
    for one in model:
        torch.nn.utils.parametrizations.spectral_norm(one)
    found = of_modules(model)
    assert found.keys() == {"module 0"}
    found["module 0"].remember()
    model[0].scale = 0.5
    assert found["module 0"].state_dict()["values"] == {"scale": 0.5}


def test_much_in_attributes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank writes it into each checkpoint."""
    one = SimpleNamespace(cache=None, table=None, steps=0)
    state = ScriptState(objects={"module 1": Attributes(one)})
    state.remember()
    one.cache, one.table, one.steps = [torch.zeros(2**18)], np.zeros(2**18), 1
    assert script_state.largest(state.state_dict()) is None
    monkeypatch.setattr(script_state, "_MUCH_BYTES", 3 * 2**20)
    assert script_state.largest(state.state_dict()) == (
        "module 1.table (2 MiB), module 1.cache (1 MiB), of 3 MiB in attributes"
    )


@pytest.mark.parametrize("name", ["is_plain", "plain", "tensors_in"])
def test_the_losses_of_all_steps_are_not_looked_at_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = SimpleNamespace(losses=[])
    state = Attributes(one)
    state.remember()
    one.losses.extend([0.5] * 1_000)
    asked: list[Any] = []
    function = getattr(plain, name)

    def counted(value: Any, **options: Any) -> Any:
        asked.append(value)
        return function(value, **options)

    for module in (attributes, plain):
        monkeypatch.setattr(module, name, counted)
    assert state.state_dict()["values"] == {"losses": [0.5] * 1_000}
    assert 0 < len(asked) < 10
