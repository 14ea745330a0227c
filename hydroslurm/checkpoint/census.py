"""What changes from step to step in the objects of a script, found by one walk from its roots: the
generator of a collate function, the temperature of a data set, a meter, the best loss so far. What
differs from before the training is saved, put back by its path in the next attempt, or named.

Nothing is called that a script has written: attributes are read from ``__dict__`` and
``__slots__``, past properties and ``__getattr__``. Nothing is unpickled: a path leads to an object
that the script has made again, and a value is put there.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import os
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from time import thread_time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hydroslurm.checkpoint import forms, rng
from hydroslurm.checkpoint.forms import FLAT, LARGE, NONE, Look, form_of, is_iterator
from hydroslurm.core.garbage import without_gc

MOST_OBJECTS, MOST_S = 50_000, 0.5
"""Where a walk ends: objects that were entered, and seconds."""
_OF_MODULE = frozenset(vars(nn.Module()))
_WRAPPERS = ("torch.nn.parallel.", "torch._dynamo.", "torch.distributed.")
_ARRAYS = (torch.Tensor, np.ndarray)
_NAMES = (str, int, float, tuple, enum.Enum)
_CONTAINERS = (dict, list, tuple, deque)
_GROWING = (dict, list, deque, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_IN_PLACE = (*_ARRAYS, dict, list, deque, set, *rng.KINDS)
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_NEVER = (
    type, types.ModuleType, types.BuiltinFunctionType, *_ARRAYS, np.generic, set, frozenset,
    torch.dtype, torch.device, str, bytes, bytearray, int, float, complex, type(None), *rng.KINDS,
)  # fmt: skip
_HEAP_TYPE = 1 << 9  # a flag of classes that Python code has made
_LOST = "has changed and cannot be saved: the next attempt begins without that"
MOVED = "is an iterator that has moved, and nothing can bring it back to its place"
_LIMIT = "is where the look for state has ended, behind {} objects: what changes in it is not saved"
_MADE = "says that {} is there, which the next attempt has to make again: it is not saved"
Write = Callable[[Any, Any], None]
Roots = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


# --- whose objects are not entered
# ------------------------------------------------------------------------------------------------

ENTERED = ""
"""In the place of a reason: objects of this package are looked into."""

_TABLE = {
    "the run saves it": "hydroslurm",
    "a state_dict() has it, or it is none": "torch",
    "its framework saves it": (
        "accelerate lightning lightning_fabric pytorch_lightning transformers trl peft deepspeed "
        "torchmetrics"
    ),
    "its position is saved": ("torch.utils.data.dataloader torchdata.stateful_dataloader"),
    "data, which a training reads": (
        "datasets pyarrow pandas polars PIL h5py lmdb cv2 av decord webdataset"
    ),
    "caches and settings of a library": (
        "tokenizers sentencepiece sklearn scipy numba triton omegaconf hydra matplotlib IPython "
        "pydantic jax numpy _pytest pytest pluggy tensorflow"
    ),
    "what it shows lies outside of this process": (
        "torch.utils.tensorboard wandb tensorboard tensorboardX mlflow comet_ml neptune aim "
        "clearml swanlab loguru tqdm rich ray dask psutil pynvml fsspec boto3 grpc requests "
        f"urllib3 httpx aiohttp zmq redis {' '.join(sys.stdlib_module_names - {'__main__'})}"
    ),
    ENTERED: (
        "torch.utils.data torch.utils.data.dataloader.DataLoader torchvision torchdata "
        "accelerate.data_loader transformers.data "
        "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader "
        "transformers.trainer_utils.RemoveColumnsCollator peft.tuners.adalora queue"
    ),
}
KNOWN: Mapping[str, str] = {name: why for why, names in _TABLE.items() for name in names.split()}
"""A package, a module in it or a class -> why nothing in its objects is state of a training. The
longest name that fits counts."""

_ALWAYS: tuple[type, ...] = (
    types.FunctionType, types.MethodType, types.SimpleNamespace, functools.partial,
)  # fmt: skip


def reason(thing: Any, known: Mapping[str, str] = KNOWN) -> str:
    """Why an object, a class or a function is not looked into; empty if it is."""
    if isinstance(thing, types.FunctionType):
        return _of_name(f"{thing.__module__}.", known)
    kind = thing if isinstance(thing, type) else type(thing)
    is_sharded = kind.__name__.startswith("FSDP") and len(kind.__bases__) > 1
    if is_sharded or kind.__name__.startswith("Parametrized"):
        kind = kind.__bases__[-1]  # torch has put a class of its own before that of the script
    if kind.__module__ in ("builtins", "collections", "itertools") or issubclass(kind, _ALWAYS):
        return ""
    return _of_name(f"{kind.__module__}.{kind.__qualname__}", known)


def _of_name(name: str, known: Mapping[str, str]) -> str:
    while name:
        if name in known:
            return known[name]
        name = name.rpartition(".")[0]
    return ""


# --- what is found
# ------------------------------------------------------------------------------------------------


class Unkept(NamedTuple):
    """State that has changed and that no value can bring back: its path as a person writes it, the
    name of its class, and half a sentence."""

    path: str
    kind: str
    why: str

    def __str__(self) -> str:
        return f"{shown(self.path)} ({self.kind}) {self.why}"


@dataclass(frozen=True)
class Variables:
    """A root that is the entries of something without attributes, such as the variables of a
    function: the walk takes them as it takes an object's."""

    entries: Mapping[str, Any]
    write: Write


@dataclass
class Node:
    """One object that the walk has entered."""

    path: str
    thing: Any
    put: Write
    values: dict[Any, Any] = field(default_factory=dict)  # what is seen to change
    looks: dict[Any, Look] = field(default_factory=dict)  # of those that are not FLAT
    objects: dict[Any, Any] = field(default_factory=dict)  # what no checkpoint can hold
    buffers: Collection[str] = ()  # names of values that are those of a module
    weights: Collection[str] = ()  # and its parameters, which are no views of others

    def at(self, name: Any) -> str:
        """The path of an entry, as a person writes it in Python."""
        is_attribute = type(name) is str and not isinstance(self.thing, _CONTAINERS)
        return f"{self.path}.{name}" if is_attribute else f"{self.path}[{forms.shown(name)}]"

    def is_fixed(self, value: Any) -> bool:
        """What is in a tuple comes back only if it changes in place."""
        return self.put is _no_put and not isinstance(value, _IN_PLACE)

    def form(self, name: Any) -> Any:
        """What is saved of a value."""
        value, look = self.values[name], self.looks.get(name)
        if self.is_fixed(value):
            return NONE
        if look is None:
            return value
        return form_of(value) if look.is_large else look.form

    def noted(self, names: Iterable[Any]) -> dict[Any, Any]:
        """A copy of what shows whether these values have changed."""
        found = {name: (self.values[name], self.looks.get(name)) for name in names}
        return {k: v if one is None else forms.copied(one.mark) for k, (v, one) in found.items()}

    def same(self, noted: Mapping[Any, Any]) -> set[Any]:
        """The names of the values that are as they were noted."""
        flat = {
            name
            for name, value in self.values.items()
            if name not in self.looks and _is_same(value, noted.get(name, NONE))
        }
        marks = {name: one.mark for name, one in self.looks.items() if name in self.values}
        return flat | (marks.keys() - forms.differing(marks, noted) if marks else set())


@dataclass
class _Past:
    """What is known of one path since :meth:`Census.note`, by the names of its entries."""

    noted: dict[Any, Any] | None = None  # by what it is seen whether values have changed
    same: dict[Any, Callable[[], Any]] = field(default_factory=dict)  # what these were
    objects: Set[Any] = frozenset()  # that were there when the first step began
    begun: dict[Any, Any] = field(default_factory=dict)  # what had changed by the first step
    restored: set[Any] = field(default_factory=set)
    late: set[Any] = field(default_factory=set)  # of these, what was first set in a step
    left_out: set[Any] = field(default_factory=set)  # from what is saved

    def note(self, node: Node, values: Mapping[Any, Any]) -> None:
        if self.noted is None:
            self.noted, self.objects = node.noted(values), set(node.objects)
            self.same = {k: _reference(v) for k, v in values.items() if type(v) not in FLAT}
        self.noted.update(node.noted(node.objects.keys() & node.values.keys() - self.noted.keys()))


@dataclass
class Census:
    """What is reached from some roots, and what of it has changed since :meth:`note`. Roots and
    models are given by name, or as what makes them anew at each look."""

    roots: Roots
    models: Roots = field(default_factory=dict)  # whose weights and buffers a state_dict() has
    all_buffers: bool = False  # also those that it has, which may be another rank's
    saved: Callable[[], Iterable[Any]] = tuple  # by somebody else, with all that hangs in it
    known: Mapping[str, str] = field(default_factory=lambda: KNOWN)  # what is not entered, and why
    without: Mapping[str, Collection[str]] = field(default_factory=dict)  # attributes, by the root
    device: Callable[[], torch.device] | None = None  # of tensors that were not on the CPU
    all_generators: bool = False  # also undrawn: one without a seed is another in each attempt
    modes: dict[str, bool] = field(default_factory=dict, init=False)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict, init=False)
    """Those that the last look has come across, which are not entered, by their paths."""

    def __post_init__(self) -> None:
        self._past = defaultdict[str, _Past](_Past)
        self._told: set[tuple[str, str]] = set()
        self._lost: list[Unkept] = []

    def note(self) -> None:
        """What does not differ from now on is as the script makes it. Called again it notes only
        objects that it has not seen, such as the variables of a second loop."""
        for node, past in self._look():
            past.note(node, node.values)

    def begin(self) -> None:
        """The first step comes next. What the script has set since :meth:`note`, and leaves alone
        from now on, may be of this process: a time, a folder, its rank."""
        for node, past in self._look():
            # a copy of weights that a hook has made: the next attempt copies others
            past.note(node, {} if isinstance(node.thing, nn.Module) else node.values)
            past.begun = node.noted(node.values.keys() - node.same(past.noted or {}))
            past.objects = set(node.objects)

    def state(self) -> dict[str, Any]:
        """All values that have changed, by the path of the object that has them."""
        found: dict[str, Any] = {}
        for node, past in self._look():
            changed = list(self._changed(node, past))
            early = node.same(past.begun) - past.late if changed and past.begun else ()
            for name, value, form in changed:
                copy = form if type(form) in FLAT else forms.copied(form)
                saved = copy, self._marks(node, past, name, value, is_early=name in early)
                found.setdefault(node.path, {})[name] = saved
        return found

    def restore(
        self, state: Mapping[str, Any], *, is_resized: bool = False, new_rank: int | None = None
    ) -> dict[str, Any]:
        """Put saved values back, and return those for which there is no object yet. A time or text
        that was set before the first step, and is set again by now, stays that of this attempt.

        Args:
            is_resized: another number of ranks has saved the state: so does all else that was set
                before the first step.
            new_rank: this one had no part in the save: generators begin streams of their own.
        """
        rest = dict(state)
        with torch.no_grad():
            for node, past in self._look():
                if saved := rest.pop(node.path, {}):
                    past.restored |= saved.keys()
                    past.late = {one for one, (_, marks) in saved.items() if "early" not in marks}
                same = node.same(past.noted or {}) if saved else set()
                for name, (form, marks) in saved.items():
                    here = node.values.get(name, node.objects.get(name, NONE))
                    is_set = here is not NONE and name not in same
                    is_own = is_resized or isinstance(form, forms.OF_PROCESS)
                    if not ("early" in marks and is_set and is_own):
                        self._restore_one(node, name, here, form, marks, new_rank)
        return rest

    def unkept(self) -> list[Unkept]:
        """What has changed since :meth:`note` and is not saved; each once."""
        for node, past in self._look():
            deque(self._changed(node, past), 0)  # for what is lost
            self._find_flags(node, past)
        return self.take_lost()

    def take_lost(self) -> list[Unkept]:
        """What :meth:`state` has come across since it was asked last."""
        found, self._lost = self._lost, []
        return found

    def _look(self) -> list[tuple[Node, _Past]]:
        walk, self.optimizers = _Walk(self), {}
        with without_gc(), torch._C.DisableTorchFunctionSubclass():
            walk.leave_out(self.saved())
            walk.go(*(one() if callable(one) else one for one in (self.models, self.roots)))
        return [(node, self._past[path]) for path, node in walk.nodes.items()]

    def name(self, path: str, what: Any, why: str) -> None:
        """What is lost, once."""
        if (path, why) not in self._told:
            self._told.add((path, why))
            self._lost.append(Unkept(path, getattr(what, "__name__", str(what)), why))

    def _changed(self, node: Node, past: _Past) -> Iterator[tuple[Any, Any, Any]]:
        """What is to be saved, by name, with its form. What is lost is named."""
        noted = past.noted or {}
        for name in node.objects.keys() & noted - node.values.keys():
            if not issubclass(kind := type(node.objects[name]), _CODE):
                self.name(node.at(name), kind, _LOST)
        if past.noted is None and not past.restored:
            return  # an object of this attempt: what has it says so
        if isinstance(node.thing, _GROWING):
            gone = noted.keys() - node.values.keys() - node.objects.keys()
            if gone or node.objects.keys() != past.objects:
                self.name(node.path, type(node.thing), _LOST)
        same = node.same(noted) - past.restored
        for name, value in node.values.items():
            is_drawn = self.all_generators and isinstance(value, rng.KINDS)
            if (name in same and not is_drawn) or name in past.left_out:
                continue
            if (form := node.form(name)) is not NONE:
                yield name, value, form
            elif name in noted:
                kind = type(value)
                self.name(node.at(name), kind, MOVED if is_iterator(kind) else _LOST)

    def _find_flags(self, node: Node, past: _Past) -> None:
        """Flags that a step has set beside an object that it has made: saved, they would keep the
        next attempt from making it again. They are not saved from now on."""
        new = node.objects.keys() - past.objects
        made = [name for name in new if not issubclass(type(node.objects[name]), _CODE)]
        if past.noted is None or not made or isinstance(node.thing, Variables):
            return
        for name, value in node.values.items():
            if value is True and past.noted.get(name, False) is False:
                past.left_out.add(name)
                self.name(node.at(name), True, _MADE.format(made[0]))

    def _marks(
        self, node: Node, past: _Past, name: Any, value: Any, *, is_early: bool
    ) -> list[str]:
        """What a restore has to know of a value."""
        look = node.looks.get(name)
        tensors = look.tensors if look else []
        if look and look.is_large:
            tensors = forms.tensors_in(value)
        marks = {
            "early": is_early,
            "same object": name in past.same and past.same[name]() is value,
            "buffer": name in node.buffers,
            "parameter": name in node.weights and name not in node.buffers,
            "process": type(value) is int and value == os.getpid() and "pid" in str(name),
            "on device": any(str(one.device) != "cpu" for one in tensors),
        }
        return [mark for mark, holds in marks.items() if holds]

    def _restore_one(
        self, node: Node, name: Any, here: Any, form: Any, marks: Any, new_rank: int | None
    ) -> None:
        if "process" in marks:  # whoever compares it makes anew what another process has made
            form = os.getpid()
        device = self.device() if self.device and "on device" in marks else None
        # who else has the same list sees what is in it; one that took its place is new
        into = here if "same object" in marks else forms.apart(here)
        made = forms.put(None if into is NONE else into, form, device=device)
        if new_rank is not None and isinstance(made, rng.KINDS):
            rng.diverge(made, new_rank)
        if "buffer" in marks and name not in node.buffers:
            node.thing._non_persistent_buffers_set.add(name)
            node.thing._buffers[name] = made
        elif "parameter" in marks and name not in node.weights:
            _add_parameter(node.thing, name, nn.Parameter(made, made.is_floating_point()))
        elif made is not here:
            node.put(name, made)
        if name == "training":
            self.modes[node.path] = made


class _Walk:
    """One look: the nodes by path."""

    def __init__(self, census: Census) -> None:
        self._census = census
        self.nodes: dict[str, Node] = {}
        self._seen: set[Any] = set(map(id, rng.global_generators()))
        self._weights: set[int] = set()
        self._of_models: set[int] = set()
        self._todo: deque[tuple[str, Any]] = deque()
        self._mode: dict[str, bool] = {}
        self._entered: dict[type, bool] = {}
        # may show weights of a model
        self._shared: list[tuple[dict[Any, Any], Any, list[torch.Tensor]]] = []
        self._ends_s = thread_time() + MOST_S

    def leave_out(self, things: Iterable[Any]) -> None:
        """Somebody else saves these, and what is in them."""
        left_out = {f"saved {n}": one for n, one in enumerate(things)}
        self.go({}, left_out)
        self._seen.update(map(id, left_out.values()))
        values = [one for node in self.nodes.values() for one in node.values.values()]
        self._weights.update(_storage(one) for one in values if isinstance(one, torch.Tensor))
        self.nodes.clear()

    def go(self, models: Mapping[str, Any], roots: Mapping[str, Any]) -> None:
        for name, model in models.items():
            self._mode[str(name)] = model.training
            for module in nn.Module.modules(model):
                self._of_models.add(id(module))
                self._weights.update(map(_storage, _saved_tensors(module)))
        for name, thing in (*models.items(), *roots.items()):
            self._offer(str(name), thing)
        while self._todo:
            count = len(self.nodes)
            if count > MOST_OBJECTS or (count % 64 == 0 and thread_time() > self._ends_s):
                path, thing = self._todo[0]
                self._census.name(path, type(thing), _LIMIT.format(count))
                self._todo.clear()
                break
            self._enter(*self._todo.popleft())
        for entries, name, tensors in self._shared:  # by now all weights are known
            if any(_storage(one) in self._weights for one in tensors):
                entries.pop(name, None)  # a list of weights, or a view of one: a state has it
        self._shared.clear()

    def _offer(self, path: str, value: Any) -> None:
        """Look into this object, once, if that is worth while."""
        kind = type(value)
        if issubclass(kind, torch.optim.Optimizer):
            self._census.optimizers[path] = value
        elif issubclass(kind, type):
            self._offer_class(value)
        elif id(value) not in self._seen and self._may_enter(kind):
            self._seen.add(id(value))
            self._todo.append((path, value))

    def _may_enter(self, kind: type) -> bool:
        if kind not in self._entered:
            is_ours = kind is Variables or issubclass(kind, nn.Module)
            is_known = not is_ours and bool(reason(kind, self._census.known))
            self._entered[kind] = not issubclass(kind, _NEVER) and not is_known
            self._offer_class(kind)
        return self._entered[kind]

    def _offer_class(self, kind: type) -> None:
        """A class of the script may count in attributes of its own."""
        is_own = kind.__flags__ & _HEAP_TYPE and not reason(kind, self._census.known)
        if is_own and id(kind) not in self._seen and not issubclass(kind, enum.Enum):
            self._seen.add(id(kind))
            self._todo.append((f"{kind.__module__}().{kind.__qualname__}", kind))
            for base in kind.__bases__:
                self._offer_class(base)

    def _enter(self, path: str, thing: Any) -> None:
        kind = type(thing)
        if kind is Variables:
            self._take(Node(path, thing, thing.write), thing.entries)
        elif issubclass(kind, type):
            own = {k: v for k, v in vars(thing).items() if not hasattr(type(v), "__get__")}
            entries = {name: one for name, one in own.items() if name[:2] != "__"}
            self._take(Node(path, thing, functools.partial(type.__setattr__, thing)), entries)
        elif issubclass(kind, nn.Module):
            self._enter_module(path, thing)
        elif issubclass(kind, types.FunctionType):
            self._enter_function(path, thing)
        elif issubclass(kind, types.MethodType):
            self._offer(path, thing.__self__)
            self._offer(f"{path}.{thing.__func__.__name__}", thing.__func__)
        elif issubclass(kind, functools.partial):
            self._offer(f"{path}.func", thing.func)
            self._take(Node(f"{path}.args", thing.args, _no_put), dict(enumerate(thing.args)))
            self._take(Node(path, thing, thing.keywords.__setitem__), thing.keywords)
        elif not is_iterator(kind):  # where those stand is noted where they are found
            self._enter_object(path, thing)

    def _enter_object(self, path: str, thing: Any) -> None:
        """An object with attributes, a container, or both."""
        kind = type(thing)
        if issubclass(kind, dict):
            first = itertools.islice(dict.keys(thing), LARGE)
            keys = {
                key if type(key) in FLAT else form_of(key): key
                for key in first
                if isinstance(key, _NAMES)
            }
            keys.pop(NONE, None)
            write: Write = lambda name, value: dict.__setitem__(thing, keys[name], value)  # noqa: E731
            node = Node(path, thing, write)
            self._take(node, {name: dict.__getitem__(thing, key) for name, key in keys.items()})
        elif issubclass(kind, (list, deque, tuple)):
            base: Any = next(one for one in (list, deque, tuple) if issubclass(kind, one))
            put = _no_put if base is tuple else functools.partial(_put_in_list, base, thing)
            entries = dict(enumerate(itertools.islice(base.__iter__(thing), LARGE)))
            self._take(Node(path, thing, put), entries)
        is_container = isinstance(thing, _CONTAINERS)
        self._enter_attributes(f"{path}'s attributes" if is_container else path, thing)

    def _enter_attributes(self, path: str, thing: Any) -> None:
        """Those in ``__dict__`` and ``__slots__``."""
        own: Any = None
        with contextlib.suppress(Exception):  # none, or a proxy of somebody's
            own = object.__getattribute__(thing, "__dict__")
        found = dict(own) if type(own) is dict else {}
        for kind in type(thing).__mro__:
            for name, slot in vars(kind).items():
                if type(slot) is types.MemberDescriptorType and name[:2] != "__":
                    with contextlib.suppress(AttributeError):  # not set yet
                        found[name] = slot.__get__(thing)
        left_out = self._census.without.get(path, ())
        node = Node(path, thing, functools.partial(object.__setattr__, thing))
        self._take(node, {name: found[name] for name in found if name not in left_out})

    def _enter_function(self, path: str, function: Any) -> None:
        """Its closure, the attributes and defaults that it has, and the globals that it names."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        own = {}
        for name, cell in cells.items():
            with contextlib.suppress(ValueError):  # empty yet
                own[name] = cell.cell_contents
        write: Write = lambda name, value: setattr(cells[name], "cell_contents", value)  # noqa: E731
        self._take(Node(path, function, write), own)
        self._enter_attributes(f"{path}'s attributes", function)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._take(Node(f"{path}'s defaults", defaults, _no_put), dict(enumerate(defaults)))
        space = function.__globals__
        if not reason(function, self._census.known):
            variables = Variables(space, space.__setitem__)
            names = [name for name in names_in(function.__code__) if name in space]
            node = Node(f"{space.get('__name__')}()", variables, variables.write)
            self._take(node, {name: space[name] for name in names})

    def _enter_module(self, path: str, module: Any) -> None:
        node = Node(path, module, functools.partial(_put_in_module, module))
        is_saved, own = id(module) in self._of_models, vars(module)
        left_out, entries = self._census.without.get(path, ()), {}
        if hasattr(type(module), "update") and "_defaults" in own:  # a metric of torchmetrics
            entries = {k: own[k] for k in (*own["_defaults"], "_update_count") if k in own}
        elif not reason(module, self._census.known):
            entries = {k: v for k, v in own.items() if k not in _OF_MODULE and k not in left_out}
        elif is_saved and not type(module).__module__.startswith(_WRAPPERS):
            kinds = (bool, int, float, str)
            entries = {k: v for k, v in own.items() if type(v) in kinds and k[:1] != "_"}
        buffers, parameters = own["_buffers"], own["_parameters"]
        is_left_out = is_saved and not self._census.all_buffers
        left = own["_non_persistent_buffers_set"] if is_left_out else buffers
        node.weights = node.buffers = {name for name in buffers if name in left}
        entries.update({name: buffers[name] for name in sorted(node.buffers)})
        if is_saved:
            trained = {k: v.requires_grad for k, v in parameters.items() if v is not None}
            node.values = {f"{name}.requires_grad": on for name, on in trained.items()}
        else:
            entries.update(parameters)
            node.weights = {*node.buffers, *parameters}
            self._weights.update(map(_storage, _saved_tensors(module)))
        self._take(node, entries)
        if "_defaults" not in own:
            # within a model in evaluation mode the modes are those of an evaluation: what counts is
            # how they were in the training, at the last look
            modes = self._census.modes
            if self._mode.setdefault(path.partition(".")[0], module.training):
                modes[path] = module.training
            node.values["training"] = modes.get(path, bool(module.training))
        children = {name: one for name, one in own["_modules"].items() if one is not None}
        node.objects.update({} if is_saved else children)
        for name, child in children.items():
            self._offer(f"{path}.{name}", child)

    def _take(self, node: Node, entries: Mapping[Any, Any]) -> None:
        """Sort the entries of an object into values and objects."""
        node = self.nodes.setdefault(node.path, node)  # of a module's variables some are known
        entries = dict(entries)
        others = {
            name: value
            for name, value in entries.items()
            if type(value) not in FLAT  # nearly all are
            if id(value) not in self._seen or not isinstance(value, rng.KINDS)
        }
        looks = forms.look(others) if others else {}
        for name, value in entries.items():
            if type(value) in FLAT:
                node.values[name] = value
                continue
            is_known = id(value) in self._seen
            if isinstance(value, rng.KINDS):
                if is_known:
                    continue
                self._seen.add(id(value))
            look = looks[name]
            if not look.is_large and (look.form is NONE or node.is_fixed(value)):
                node.objects[name] = value
                self._offer(node.at(name), value)
                if is_known or look.mark is NONE:
                    continue
            node.values[name], node.looks[name] = value, look
            if name not in node.weights and look.tensors:
                self._shared.append((node.values, name, look.tensors))


def _put_in_module(module: Any, name: str, value: Any) -> None:
    weight, _, setting = name.rpartition(".")
    own = vars(module)
    if setting == "requires_grad" and weight in own["_parameters"]:
        own["_parameters"][weight].requires_grad_(value)
    elif name in own["_parameters"]:  # an optimizer may have it
        shape = list(own["_parameters"][name].shape)
        raise ValueError(f"{name} has the shape {shape} in this script")
    else:
        (own["_buffers"] if name in own["_buffers"] else own)[name] = value


def _add_parameter(module: Any, name: str, made: nn.Parameter) -> None:
    """One that the script adds while it trains. torch's containers count theirs themselves."""
    if isinstance(module, nn.ParameterList):
        module.append(made)
    elif isinstance(module, nn.ParameterDict):
        module[name] = made
    else:
        module.register_parameter(name, made)


def _put_in_list(base: Any, thing: Any, number: int, value: Any) -> None:
    """Also behind the end; where objects before it are missing it has no place."""
    if number < base.__len__(thing):
        base.__setitem__(thing, number, value)
    elif number == base.__len__(thing):
        base.append(thing, value)


def _no_put(name: Any, value: Any) -> None:
    """In a tuple only what is changed in place comes back."""


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function and the functions in it name."""
    inner = (names_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return tuple(dict.fromkeys(itertools.chain(code.co_names, *inner)))


def shown(path: str) -> str:
    """Without the function whose variable the path begins with."""
    return path.rpartition("().")[2]


def _saved_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The parameters of a module and those of its buffers that are part of its state."""
    own = vars(module)
    found, left_out = {**own["_parameters"], **own["_buffers"]}, own["_non_persistent_buffers_set"]
    return [one for name, one in found.items() if one is not None and name not in left_out]


def _storage(tensor: torch.Tensor) -> int:
    with contextlib.suppress(RuntimeError):  # a sparse one has none
        if type(tensor) in (torch.Tensor, nn.Parameter):
            return tensor.untyped_storage().data_ptr() or id(tensor)
    return id(tensor)


def _reference(value: Any) -> Callable[[], Any]:
    return weakref.ref(value) if isinstance(value, _ARRAYS) else lambda: value


def _is_same(value: Any, before: Any) -> bool:
    """Of two FLAT values."""
    return type(before) is type(value) and (before is value or bool(before == value))
