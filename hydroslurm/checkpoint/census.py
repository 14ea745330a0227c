"""What changes from step to step in the objects of a script, found by one walk from its roots.

A ``state_dict()`` has the weights. Much else lives from one step to the next: the generator of a
collate function, the temperature of a data set, a meter, a teacher in a list, the best loss so far.
The walk sees all of it before the training and at each save; what differs is saved, put back by its
path in the next attempt, or named where no value of it can be saved.

Nothing is called that a script has written: attributes are read from ``__dict__`` and
``__slots__``, past properties and ``__getattr__``. Nothing is unpickled: a path leads to an object
that the script has made again, and a value is put there.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import time
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.known import KNOWN, reason
from hydroslurm.checkpoint.plain import (
    MANY,
    equal,
    form_of,
    is_dense,
    is_plain,
    plain,
    put,
    tensors_in,
)
from hydroslurm.checkpoint.tree import is_dtensor

MOST_OBJECTS, MOST_S = 50_000, 0.5
"""Where a walk ends: objects that were entered, and seconds."""
_LARGE, _LARGE_BYTES, _SAMPLED = 10_000, 2**20, 512
_NONE = object()
_OF_MODULE = frozenset(vars(torch.nn.Module()))
_GENERATOR = "generator: "
"""Begins the mark of one, before the name of its class."""
_SETTINGS = (bool, int, float, str)
_WRAPPERS = ("torch.nn.parallel.", "torch._dynamo.", "torch.distributed.")


@dataclass(frozen=True)
class Unkept:
    """State that has changed and that no value can bring back.

    Attributes:
        path: as a person writes it. kind: the name of its class. why: half a sentence.
    """

    path: str
    kind: str
    why: str

    def __str__(self) -> str:
        return f"{shown(self.path)} ({self.kind}) {self.why}"


@dataclass
class Node:
    """One object that the walk has entered.

    Attributes:
        values: what in it can be saved, by name. objects: what else is in it.
        put: writes one entry.
        buffers: names of values that are buffers of a module. weights: those that are its own
            parameters or buffers, and no views of others.
    """

    path: str
    thing: Any
    put: Callable[[Any, Any], None]
    values: dict[Any, Any] = field(default_factory=dict)
    objects: dict[Any, Any] = field(default_factory=dict)
    buffers: Collection[str] = ()
    weights: Collection[str] = ()


class Variables:
    """Roots that are the entries of something without attributes, such as the variables of a
    function: the walk takes them as it takes an object's.

    Args:
        entries: by name. write: sets one of them.
    """

    def __init__(self, entries: Mapping[str, Any], write: Callable[[str, Any], None]) -> None:
        self.entries, self.write = entries, write


class Census:
    """What is reached from some roots, and what of it has changed since :meth:`note`.

    Args:
        roots: by name, or what makes them anew at each look.
        models: modules whose weights and buffers a ``state_dict()`` has; how they are set, their
            attributes and their other buffers are part of the census.
        all_buffers: so are those that a ``state_dict()`` has, which may be another rank's.
        saved: objects that somebody else saves, with all that hangs in them.
        known: classes whose objects are not entered, each with the reason; see :data:`KNOWN`.
        without: names of attributes that are left out, by the name of a root or model.
        device: on which tensors are that were not on the CPU and are not there yet.
        all_generators: whether those are saved, too, that nobody has drawn from: one without a seed
            is another in each attempt.

    Attributes:
        optimizers: those that the last look has come across, which are not entered, by their paths.
    """

    def __init__(
        self,
        roots: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        models: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = types.MappingProxyType({}),
        saved: Callable[[], Iterable[Any]] = tuple,
        known: Mapping[str, str] = KNOWN,
        without: Mapping[str, Collection[str]] = types.MappingProxyType({}),
        device: Callable[[], torch.device] | None = None,
        all_generators: bool = False,
        all_buffers: bool = False,
    ) -> None:
        self._all_generators, self._all_buffers = all_generators, all_buffers
        self._roots = roots if callable(roots) else lambda: roots
        self._models = models if callable(models) else lambda: models
        self._saved, self._known, self._without = saved, known, without
        self._device = device
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._before: dict[str, dict[Any, Any]] = {}
        self._at_begin: dict[str, dict[Any, Any]] = {}
        self._made: dict[str, set[Any]] = {}
        self._iterators: dict[str, object] = {}
        self._restored: dict[str, set[Any]] = {}
        self._late: dict[str, set[Any]] = {}
        self._left_out: dict[str, set[Any]] = {}
        self._modes: dict[str, bool] = {}
        self._told: set[tuple[str, str]] = set()
        self._lost: list[Unkept] = []

    def note(self) -> None:
        """What does not differ from now on is as the script makes it. Called again it notes only
        objects that it has not seen, such as the variables of a second loop."""
        walk = self._look()
        with _no_collection():
            for path in walk.nodes.keys() - self._before.keys():
                node = walk.nodes[path]
                self._before[path] = {name: _noted(value) for name, value in node.values.items()}
                self._made[path] = set(node.objects)
        self._iterators = {**walk.iterators, **self._iterators}

    def begin(self) -> None:
        """The first step comes next. What the script has set since :meth:`note`, and leaves alone
        from now on, may be of this process: a time, a folder, its rank."""
        nodes = self._look().nodes
        for path in nodes.keys() - self._before.keys():
            # a copy of weights that a hook has made: the next attempt copies others
            is_copy = isinstance(nodes[path].thing, torch.nn.Module)
            values = {} if is_copy else nodes[path].values
            self._before[path] = {name: _noted(value) for name, value in values.items()}
            self._made[path] = set(nodes[path].objects)
        self._at_begin = {
            path: {
                name: _noted(value)
                for name, value in node.values.items()
                if not _shows(self._before.get(path, {}).get(name, _NONE), value)
            }
            for path, node in nodes.items()
        }

    def state(self) -> dict[str, Any]:
        """All values that have changed, by the path of the object that has them; empty if none
        has."""
        found = {}
        walk = self._look()
        self._find_lost(walk)
        for path, node in walk.nodes.items():
            if changed := self._changed(node):
                found[path] = {
                    name: (_saved_form(value), self._marks(node, name, value))
                    for name, value in changed.items()
                }
        return found

    def restore(
        self, state: Mapping[str, Any], *, is_resized: bool = False, new_rank: int | None = None
    ) -> dict[str, Any]:
        """Put saved values back. A time or a text that was set before the first step, and is set
        again by now, stays as it is: it is that of this attempt, by the clock of this machine, or a
        folder of this job.

        Args:
            is_resized: another number of ranks has saved the state: so does everything else that
                was set before the first step.
            new_rank: of this process, if it had no part in the save: generators begin streams of
                their own.

        Returns:
            The part of the state for which there is no object yet.
        """
        nodes = self._look().nodes
        with torch.no_grad():
            for path in state.keys() & nodes.keys():
                self._restore_one(nodes[path], state[path], is_resized, new_rank)
        return {path: saved for path, saved in state.items() if path not in nodes}

    def unkept(self) -> list[Unkept]:
        """What has changed since :meth:`note` and is not saved; also what :meth:`state` has come
        across. Each once."""
        walk = self._look()
        self._find_lost(walk)
        for node in walk.nodes.values():
            self._lost += self._flags(node)
        return self.take_lost()

    def take_lost(self) -> list[Unkept]:
        """What :meth:`state` has come across since it was asked last."""
        found, self._lost = self._lost, []
        return found

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _look(self) -> _Walk:
        walk = _Walk(self._known, self._without, self._modes, all_buffers=self._all_buffers)
        with _no_collection():  # thousands of small dicts would have all of the heap looked through
            walk.leave_out(self._saved())
            walk.go(self._models(), self._roots())
        self.optimizers = walk.optimizers
        return walk

    def _find_lost(self, walk: _Walk) -> None:
        found = list(walk.limits)
        for path, node in walk.nodes.items():
            for name, value in node.objects.items():
                if name in self._before.get(path, ()) and _is_state(value):
                    at = _joined(path, name, is_item=isinstance(node.thing, _CONTAINERS))
                    found.append(Unkept(at, _kind(value), _LOST))
        for path, mark in walk.iterators.items():
            if not equal(self._iterators.get(path, mark), mark):
                found.append(Unkept(path, walk.kinds[path], MOVED))
        fresh = [one for one in found if (one.path, one.why) not in self._told]
        self._told |= {(one.path, one.why) for one in fresh}
        self._lost += fresh

    def _changed(self, node: Node) -> dict[Any, Any]:
        path = node.path
        restored = self._restored.get(path, ())
        if path not in self._before and not restored:
            return {}  # an object of this attempt: what has it says so
        before, left_out = self._before.get(path, {}), self._left_out.get(path, ())
        return {
            name: value
            for name, value in node.values.items()
            if name not in left_out
            and (
                name in restored
                or (self._all_generators and isinstance(value, rng.KINDS))
                or not _shows(before.get(name, _NONE), value)
            )
            and (not _is_large(value) or is_plain(value))
        }

    def _marks(self, node: Node, name: Any, value: Any) -> list[str]:
        """What a restore has to know of a value."""
        late, begun = self._late.get(node.path, ()), self._at_begin.get(node.path, {})
        noted = self._before.get(node.path, {}).get(name)
        marks = {
            "early": name not in late and _shows(begun.get(name, _NONE), value),
            "same object": isinstance(noted, _Noted) and noted.same() is value,
            "buffer": name in node.buffers,
            "process": type(value) is int and value == os.getpid() and "pid" in str(name),
            "on device": any(one.device.type != "cpu" for one in tensors_in(value)),
        }
        kind = [f"{_GENERATOR}{_kind(value)}"] if isinstance(value, rng.KINDS) else []
        return [*(mark for mark, holds in marks.items() if holds), *kind]

    def _restore_one(
        self, node: Node, state: Mapping[Any, Any], is_resized: bool, new_rank: int | None
    ) -> None:
        path, before = node.path, self._before.get(node.path, {})
        self._restored[path] = {*self._restored.get(path, ()), *state}
        self._late[path] = {name for name, (_, marks) in state.items() if "early" not in marks}
        for name, (value, marks) in state.items():
            if "process" in marks:  # whoever compares it makes anew what another process has made
                value = os.getpid()
            here = node.values.get(name, node.objects.get(name, _NONE))
            is_set = here is not _NONE and not _shows(before.get(name, _NONE), here)
            is_own = is_resized or isinstance(value, (float, str))
            if "early" in marks and is_set and is_own:
                continue
            kind = next((one for one in marks if one.startswith(_GENERATOR)), "")
            if kind and not isinstance(here, rng.KINDS):  # the script makes it when it draws
                here = rng.made_from(kind.removeprefix(_GENERATOR), value)
                node.put(name, here)
            if isinstance(here, rng.KINDS):
                rng.set_state(here, value)
                if new_rank is not None:
                    rng.diverge(here, new_rank)
                continue
            device = self._device() if self._device and "on device" in marks else None
            # who else has the same list sees what is in it; one that took its place is new
            form = here if "same object" in marks else form_of(here)
            made = put(None if form is _NONE else form, value, device=device)
            if "buffer" in marks and name not in node.buffers:
                node.thing._non_persistent_buffers_set.add(name)
                node.thing._buffers[name] = made
            else:
                node.put(name, made)
            if name == "training":
                self._modes[path] = made

    def _flags(self, node: Node) -> Iterator[Unkept]:
        """Flags that a step has set beside an object that it has made: saved, they would keep the
        next attempt from making it again. They are not saved from now on."""
        path, before = node.path, self._before.get(node.path)
        made = [
            name
            for name, value in node.objects.items()
            if name not in self._made.get(path, ()) and _is_state(value)
        ]
        if before is None or not made or isinstance(node.thing, Variables):
            return
        left_out = self._left_out.setdefault(path, set())
        for name, value in node.values.items():
            if value is True and before.get(name, False) is False and name not in left_out:
                left_out.add(name)
                why = f"says that {made[0]} is there, which the next attempt has to make again: "
                yield Unkept(_joined(path, name), "True", why + "it is not saved")


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Walk:
    """One look at everything.

    Attributes:
        nodes: what was entered, by path. iterators: where each stands. kinds: their classes.
        limits: where the walk has ended early. optimizers: those that it has come across.
    """

    def __init__(
        self,
        known: Mapping[str, str],
        without: Mapping[str, Collection[str]],
        modes: dict[str, bool],
        *,
        all_buffers: bool,
    ) -> None:
        self._all_buffers = all_buffers
        self.nodes: dict[str, Node] = {}
        self.iterators: dict[str, object] = {}
        self.kinds: dict[str, str] = {}
        self.limits: list[Unkept] = []
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._known, self._without, self._modes = known, without, modes
        self._seen: set[Any] = set(map(id, rng.global_generators()))
        self._weights: set[int] = set()
        self._of_models: set[int] = set()
        self._todo: deque[tuple[str, Any]] = deque()
        self._mode: dict[str, bool] = {}
        self._entered: dict[type, bool] = {}
        self._shared: list[tuple[Node, Any]] = []
        """Values that may show weights of a model."""
        self._ends_s = time.thread_time() + MOST_S

    def leave_out(self, things: Iterable[Any]) -> None:
        """Somebody else saves these, and what is in them."""
        left_out = {f"saved {n}": one for n, one in enumerate(things)}
        self.go({}, left_out)
        self._seen.update(map(id, left_out.values()))
        for node in self.nodes.values():
            tensors = (v for v in node.values.values() if isinstance(v, torch.Tensor))
            self._weights.update(_storage(one) for one in tensors)
        self.nodes.clear()
        self.iterators.clear()

    def go(self, models: Mapping[str, Any], roots: Mapping[str, Any]) -> None:
        for name, model in models.items():
            self._mode[str(name)] = model.training
            for module in torch.nn.Module.modules(model):
                self._of_models.add(id(module))
                self._weights.update(map(_storage, _saved_tensors(module)))
            self._offer(str(name), model)
        for name, thing in roots.items():
            self._offer(name, thing)
        while self._todo:
            count = len(self.nodes)
            if count > MOST_OBJECTS or (count % 64 == 0 and time.thread_time() > self._ends_s):
                path, thing = self._todo[0]
                self.limits.append(Unkept(path, _kind(thing), _LIMIT.format(count)))
                self._todo.clear()
                break
            self._enter(*self._todo.popleft())
        for node, name in self._shared:  # by now all weights are known
            if not self._is_own(node.values[name]):
                del node.values[name]
        self._shared.clear()

    def _offer(self, path: str, value: Any) -> None:
        """Look into this object, once, if that is worth while."""
        kind = type(value)
        if issubclass(kind, torch.optim.Optimizer):
            self.optimizers[path] = value
        elif id(value) not in self._seen and self._may_enter(kind):
            self._seen.add(id(value))
            self._todo.append((path, value))

    def _may_enter(self, kind: type) -> bool:
        if kind not in self._entered:
            is_ours = kind is Variables or issubclass(kind, torch.nn.Module)
            is_known = not is_ours and bool(reason(kind, self._known))
            self._entered[kind] = not issubclass(kind, _NEVER) and not is_known
        return self._entered[kind]

    def _enter(self, path: str, thing: Any) -> None:
        kind = type(thing)
        if kind is Variables:
            self._take(Node(path, thing, thing.write), thing.entries)
        elif issubclass(kind, torch.nn.Module):
            self._enter_module(path, thing)
        elif issubclass(kind, types.FunctionType):
            self._enter_function(path, thing)
        elif issubclass(kind, types.MethodType):
            self._offer(path, thing.__self__)
            self._offer(f"{path}.{thing.__func__.__name__}", thing.__func__)
        elif issubclass(kind, functools.partial):
            self._offer(f"{path}.func", thing.func)
            self._take(Node(f"{path}.args", thing, _no_put), dict(enumerate(thing.args)))
            self._take(Node(path, thing, thing.keywords.__setitem__), thing.keywords)
        elif _is_iterator(kind):
            self._enter_iterator(path, thing)
        else:
            self._enter_object(path, thing)

    def _enter_object(self, path: str, thing: Any) -> None:
        """An object with attributes, a container, or both."""
        kind = type(thing)
        if issubclass(kind, dict):
            entries = {key: thing[key] for key in _first(dict.keys(thing)) if _is_name(key)}
            self._take(Node(path, thing, functools.partial(dict.__setitem__, thing)), entries)
        elif issubclass(kind, (list, deque)):
            write = functools.partial(kind.__setitem__, thing)
            self._take(Node(path, thing, write), dict(enumerate(_first(thing))))
        elif issubclass(kind, tuple):
            self._take(Node(path, thing, _no_put), dict(enumerate(_first(thing))))
        own, slots = _vars(thing), _slots(thing)
        if own is not None or slots:
            place = f"{path}'s attributes" if isinstance(thing, _CONTAINERS) else path
            left_out = self._without.get(path, ())
            entries = {k: v for k, v in {**(own or {}), **slots}.items() if k not in left_out}
            self._take(Node(place, thing, _writer(thing, own, slots)), entries)

    def _enter_function(self, path: str, function: Any) -> None:
        """Its closure, the attributes and defaults that it has, and the globals that it names."""
        closure = function.__closure__ or ()
        cells = dict(zip(function.__code__.co_freevars, closure, strict=True))
        own = {name: cell.cell_contents for name, cell in cells.items() if _is_filled(cell)}

        def write(name: str, value: Any) -> None:
            cells[name].cell_contents = value

        self._take(Node(path, function, write), own)
        if (attributes := _vars(function)) is not None:
            self._take(Node(f"{path}'s attributes", function, attributes.__setitem__), attributes)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for number, one in enumerate(defaults):
            if not is_plain(one):
                self._take(Node(f"{path}'s default {number}", function, _no_put), {"value": one})
        space = function.__globals__
        if not reason(function, self._known):
            variables = Variables(space, space.__setitem__)
            node = Node(f"{space.get('__name__')}()", variables, variables.write)
            names = [name for name in names_in(function.__code__) if name in space]
            self._take(node, {name: space[name] for name in names})

    def _enter_iterator(self, path: str, thing: Any) -> None:
        """Not moved, but noted where it stands."""
        mark = _place_of(thing)
        if mark is not None:
            self.iterators[path], self.kinds[path] = mark, _kind(thing)

    def _enter_module(self, path: str, module: Any) -> None:
        node = Node(path, module, functools.partial(_put_in_module, module))
        is_saved, own = id(module) in self._of_models, vars(module)
        root = path.partition(".")[0]
        is_librarys = bool(reason(module, self._known))
        left_out = self._without.get(path, ())
        if hasattr(type(module), "update") and "_defaults" in own:  # a metric of torchmetrics
            entries = {k: own[k] for k in (*own["_defaults"], "_update_count") if k in own}
        elif not is_librarys:
            entries = {k: v for k, v in own.items() if k not in _OF_MODULE and k not in left_out}
        elif is_saved and not type(module).__module__.startswith(_WRAPPERS):
            entries = {
                k: v for k, v in own.items() if type(v) in _SETTINGS and not k.startswith("_")
            }
        else:
            entries = {}
        buffers = own["_buffers"]
        is_left_out = is_saved and not self._all_buffers
        left = own["_non_persistent_buffers_set"] if is_left_out else buffers
        node.buffers = {name for name in buffers if name in left}
        entries = {**entries, **{name: buffers[name] for name in sorted(node.buffers)}}
        node.weights = node.buffers
        if not is_saved:
            entries.update(own["_parameters"])
            node.weights = {*node.buffers, *own["_parameters"]}
            self._weights.update(map(_storage, _saved_tensors(module)))
        self._take(node, entries)
        if is_saved:
            for name, weight in own["_parameters"].items():
                if weight is not None:
                    node.values[f"{name}.requires_grad"] = weight.requires_grad
        if "_defaults" not in own:
            node.values["training"] = self._training(path, root, module)
        for name, child in own["_modules"].items():
            if child is not None:
                self._offer(f"{path}.{name}", child)

    def _training(self, path: str, root: str, module: Any) -> bool:
        """Within a model in evaluation mode the modes are those of an evaluation: what counts is
        how they were in the training, at the last look."""
        if self._mode.setdefault(root, module.training):
            self._modes[path] = module.training
        return self._modes.get(path, bool(module.training))

    def _take(self, node: Node, entries: Mapping[Any, Any]) -> None:
        """Sort the entries of an object into values and objects."""
        node = self.nodes.setdefault(node.path, node)  # of a module's variables some are known
        for name, value in list(entries.items()):
            if type(value) in _FLAT:
                node.values[name] = value
            elif isinstance(value, rng.KINDS):
                if id(value) not in self._seen and not isinstance(value, random.SystemRandom):
                    self._seen.add(id(value))
                    node.values[name] = value
            elif _is_large(value) or is_plain(value):
                if node.put is not _no_put or isinstance(value, (torch.Tensor, np.ndarray)):
                    node.values[name] = value
                    if name not in node.weights and not _is_large(value):
                        self._shared.append((node, name))
            else:
                node.objects[name] = value
                is_item = isinstance(node.thing, _CONTAINERS)
                self._offer(_joined(node.path, name, is_item=is_item), value)

    def _is_own(self, value: Any) -> bool:
        """Whether nobody else saves it: a list of weights, or a view of one, shows what a state
        has."""
        return not any(
            tensor.numel() and _storage(tensor) in self._weights for tensor in tensors_in(value)
        )


_FLAT = frozenset((bool, int, float, complex, str, type(None)))
_CODE = (
    type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
)  # fmt: skip
_CONTAINERS = (dict, list, tuple, deque)
_LOST = "can be saved no more, and the next attempt begins without it"
MOVED = "is an iterator that has moved, and nothing can bring it back to its place"
_LIMIT = "is where the look for state has ended, behind {} objects: what changes in it is not saved"
_NEVER = (
    type, types.ModuleType, types.BuiltinFunctionType, torch.Tensor, np.ndarray, np.generic,
    torch.dtype, torch.device, str, bytes, bytearray, int, float, complex, set, frozenset,
    type(None), *rng.KINDS,
)  # fmt: skip


def _is_state(value: Any) -> bool:
    """Whether an object may hold what the next steps need; a function or a class does not."""
    return not issubclass(type(value), _CODE)


def _put_in_module(module: Any, name: str, value: Any) -> None:
    weight, _, setting = name.rpartition(".")
    own = vars(module)
    if setting == "requires_grad" and weight in own["_parameters"]:
        own["_parameters"][weight].requires_grad_(value)
    elif name in own["_parameters"] or name in own["_buffers"]:
        holder = own["_parameters" if name in own["_parameters"] else "_buffers"]
        here = holder[name]
        if here is not value and type(here) is torch.nn.Parameter:
            if here.shape != value.shape:
                raise ValueError(f"{name} has the shape {list(here.shape)} in this script")
            here.detach().copy_(value)  # an optimizer may have it
            return
        holder[name] = value
    else:
        own[name] = value


def _no_put(name: Any, value: Any) -> None:
    """In a tuple only what is changed in place comes back."""


def _vars(thing: Any) -> dict[str, Any] | None:
    try:
        own = object.__getattribute__(thing, "__dict__")
    except Exception:  # none, or a proxy of somebody's
        return None
    return own if type(own) is dict else None


def _slots(thing: Any) -> dict[str, Any]:
    found = {}
    for kind in type(thing).__mro__:
        for name, slot in vars(kind).items():
            if type(slot) is types.MemberDescriptorType and name[:2] != "__":
                try:
                    found[name] = slot.__get__(thing)
                except AttributeError:  # not set yet
                    continue
    return found


def _writer(
    thing: Any, own: dict[str, Any] | None, slots: Mapping[str, Any]
) -> Callable[[str, Any], None]:
    def write(name: str, value: Any) -> None:
        if own is not None and name not in slots:
            own[name] = value
        else:
            object.__setattr__(thing, name, value)

    return write


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not _NONE
    except ValueError:
        return False


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function and the functions in it name."""
    inner = (names_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return tuple(dict.fromkeys(itertools.chain(code.co_names, *inner)))


def _first(entries: Iterable[Any]) -> list[Any]:
    return list(itertools.islice(entries, _LARGE))


def _is_name(key: Any) -> bool:
    return type(key) in (str, int, float, bool) or (type(key) is tuple and is_plain(key))


def _joined(path: str, name: Any, *, is_item: bool = False) -> str:
    """As a person writes it in Python."""
    return f"{path}[{name!r}]" if is_item or type(name) is not str else f"{path}.{name}"


def shown(path: str) -> str:
    """Without the function whose variable the path begins with."""
    return path.rpartition("().")[2]


def _kind(value: Any) -> str:
    return type(value).__name__


def _place_of(iterator: Any) -> object:
    """What tells whether an iterator has moved; None of one that a run hands out."""
    if type(iterator) is types.GeneratorType:
        frame = iterator.gi_frame
        if iterator.gi_running or (frame and "hydroslurm" in frame.f_code.co_filename):
            return None
        if frame is None:
            return "at its end"
        local = frame.f_locals
        if any(_is_position(type(value)) for value in local.values()):
            return None  # what it reads goes on where it stood
        found = (frame.f_lasti, *(_identity(local[name]) for name in sorted(local)))
        if hasattr(local, "clear"):  # before Python 3.13 a copy, which the frame keeps
            local.clear()
        return found
    inner = [one for one in gc.get_referents(iterator) if not isinstance(one, type)]
    inner += [each for one in inner if type(one) is tuple for each in one]  # of a zip
    marks = [_identity(one) for one in inner]
    if any(mark is None and one is not None for mark, one in zip(marks, inner, strict=True)):
        return None
    hint = iterator.__length_hint__() if hasattr(iterator, "__length_hint__") else None
    shown = repr(iterator) if isinstance(iterator, itertools.count) else None
    return (hint, shown, *marks)


def _is_position(kind: type) -> bool:
    """Whether a run has put a loader that it follows in the place of the script's."""
    return any(one.__module__.startswith("hydroslurm.integrations") for one in kind.__mro__)


def _identity(value: Any) -> object:
    if _is_iterator(type(value)):
        return _place_of(value)
    if isinstance(value, rng.KINDS):
        return rng.state_of(value)
    if isinstance(value, _CONTAINERS):
        return id(value), len(value)
    return value if type(value) in _FLAT else id(value)


def _is_iterator(kind: type) -> bool:
    """Whether it is one of Python's own, or a generator."""
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")


def _saved_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The parameters of a module and those of its buffers that are part of its state."""
    own = vars(module)
    for name, one in (*own["_parameters"].items(), *own["_buffers"].items()):
        is_saved = one is not None and name not in own["_non_persistent_buffers_set"]
        if is_saved and is_dense(one) and one.numel():
            yield one


def _storage(tensor: torch.Tensor) -> int:
    if is_dtensor(tensor):
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)


# --- what tells whether a value has changed
# ------------------------------------------------------------------------------------------------


def _is_large(value: Any) -> bool:
    return isinstance(value, (dict, *MANY)) and len(value) > _LARGE


@dataclass(frozen=True)
class _Noted:
    """A copy of a value; or of what is too large to be copied, and may never change, a sample.

    Attributes:
        same: asks for the object that it was.
    """

    same: Callable[[], Any]
    copy: Any
    is_sample: bool = False


def _sample(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sample = torch.empty(0)
        if value.is_contiguous():  # a write through .data is not counted
            sample = value.detach().view(-1)[:: value.numel() // _SAMPLED].clone()
        return int(value._version), sample
    if isinstance(value, np.ndarray):
        return _sum_of(value) if value.flags.writeable else 0
    step = max(1, len(value) // _SAMPLED)
    entries = value.values() if isinstance(value, Mapping) else value
    sampled = value[::step] if isinstance(value, (list, tuple)) else entries
    return len(value), [id(one) for one in itertools.islice(sampled, 2 * _SAMPLED)]


def _sum_of(array: Any) -> int:
    """Of all bytes, or of many pieces from one end to the other."""
    flat = array.reshape(-1).view(np.uint8) if array.flags.c_contiguous else None
    if flat is None:
        return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    if flat.nbytes <= 8 * _LARGE_BYTES:
        return zlib.crc32(flat.data)
    found, step = 0, flat.nbytes // _SAMPLED
    for start in range(0, flat.nbytes, step):
        found = zlib.crc32(flat[start : start + 2048].data, found)
    return found


def _noted(value: Any) -> Any:
    """By what it will be seen whether this value has changed."""
    if type(value) in _FLAT:
        return value
    is_array = isinstance(value, (torch.Tensor, np.ndarray))
    same = weakref.ref(value) if is_array else lambda: value
    if is_array:
        counts = isinstance(value, np.ndarray) or not value.is_inference()
        if counts and value.nbytes > _LARGE_BYTES:
            return _Noted(same, _sample(value), is_sample=True)
    elif _is_large(value):
        return _Noted(same, _sample(value), is_sample=True)
    return _Noted(same, _saved_form(value))


def _shows(noted: Any, value: Any) -> bool:
    if type(value) in _FLAT:
        return type(noted) is type(value) and (noted is value or bool(noted == value))
    if not isinstance(noted, _Noted):
        return False
    if noted.is_sample:
        return noted.same() is value and equal(_sample(value), noted.copy)
    return equal(_form(value), noted.copy)


def _form(value: Any) -> Any:
    return rng.state_of(value) if isinstance(value, rng.KINDS) else value


def _saved_form(value: Any) -> Any:
    return plain(_form(value))
