"""One walk over what is in reach of a script, from its roots: every value that may change, and its
form, what a checkpoint can hold of it. A form has the same tensors; what
:mod:`hydroslurm.checkpoint.tree` does not know is ``(TAG, name, body)`` in it.

Nothing is called that a script has written: attributes are read from ``__dict__`` and
``__slots__``, past properties and ``__getattr__``.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import gc
import itertools
import random
import sys
import types
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from time import thread_time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.tree import FACTORIES, LEAVES, NUMPY_KINDS

MOST_OBJECTS, MOST_S = 50_000, 0.5
"""Where a walk ends: objects that were entered, and seconds."""
_OF_MODULE = frozenset(vars(nn.Module()))
_WRAPPERS = ("torch.nn.parallel.", "torch._dynamo.", "torch.distributed.")
ARRAYS = (torch.Tensor, np.ndarray)
_NAMES = (str, int, float, tuple, enum.Enum)
_CONTAINERS = (dict, list, tuple, deque)
_IN_PLACE = (*ARRAYS, dict, list, deque, set, *rng.KINDS)
_NEVER = (
    type, types.ModuleType, types.BuiltinFunctionType, *ARRAYS, np.generic, set, frozenset,
    torch.dtype, torch.device, str, bytes, bytearray, int, float, complex, type(None), *rng.KINDS,
)  # fmt: skip
_HEAP_TYPE = 1 << 9  # a flag of classes that Python code has made
_LIMIT = "is where the look for state has ended, behind {} objects: what changes in it is not saved"
Write = Callable[[Any, Any], None]
NONE = object()
"""In the place of a form: no checkpoint can hold it."""
TAG = "$as"
FLAT = frozenset((bool, int, float, complex, str, type(None), bytes))
MANY = (list, tuple, deque, set, frozenset)
_MOST_DEPTH = 5
LARGE = 10_000
_LARGE_BYTES, _SAMPLED = 2**20, 512


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


# --- the walk
# ------------------------------------------------------------------------------------------------


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
        return f"{self.path}.{name}" if is_attribute else f"{self.path}[{shown_key(name)}]"

    def is_fixed(self, value: Any) -> bool:
        """What is in a tuple comes back only if it changes in place."""
        return self.put is no_put and not isinstance(value, _IN_PLACE)


class Walk:
    """One look.

    Attributes:
        nodes: what was entered, by path.
        optimizers: those that were come across, which are not entered, by path.
        cuts: where the walk has ended before its end: path, kind and why.

    Args:
        known: what is not entered, and why.
        without: attributes that are left out, by the path of their object.
        all_buffers: buffers of models count though a ``state_dict()`` has them.
        modes: of modules, at the last look at them in training; kept up to date.
    """

    def __init__(
        self,
        *,
        known: Mapping[str, str],
        without: Mapping[str, Collection[str]],
        all_buffers: bool,
        modes: dict[str, bool],
    ) -> None:
        self._known, self._without = known, without
        self._all_buffers, self._modes = all_buffers, modes
        self.nodes: dict[str, Node] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.cuts: list[tuple[str, type, str]] = []
        self._seen: set[int] = set()
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
                self.cuts.append((path, type(thing), _LIMIT.format(count)))
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
            self.optimizers[path] = value
        elif issubclass(kind, type):
            self._offer_class(value)
        elif id(value) not in self._seen and self._may_enter(kind):
            self._seen.add(id(value))
            self._todo.append((path, value))

    def _may_enter(self, kind: type) -> bool:
        if kind not in self._entered:
            is_ours = kind is Variables or issubclass(kind, nn.Module)
            is_known = not is_ours and bool(reason(kind, self._known))
            self._entered[kind] = not issubclass(kind, _NEVER) and not is_known
            self._offer_class(kind)
        return self._entered[kind]

    def _offer_class(self, kind: type) -> None:
        """A class of the script may count in attributes of its own."""
        is_own = kind.__flags__ & _HEAP_TYPE and not reason(kind, self._known)
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
            self._take(Node(f"{path}.args", thing.args, no_put), dict(enumerate(thing.args)))
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
            put = no_put if base is tuple else functools.partial(_put_in_list, base, thing)
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
        left_out = self._without.get(path, ())
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
        self._take(Node(f"{path}'s defaults", defaults, no_put), dict(enumerate(defaults)))
        space = function.__globals__
        if not reason(function, self._known):
            variables = Variables(space, space.__setitem__)
            names = [name for name in names_in(function.__code__) if name in space]
            node = Node(f"{space.get('__name__')}()", variables, variables.write)
            self._take(node, {name: space[name] for name in names})

    def _enter_module(self, path: str, module: Any) -> None:
        node = Node(path, module, functools.partial(_put_in_module, module))
        is_saved, own = id(module) in self._of_models, vars(module)
        left_out, entries = self._without.get(path, ()), {}
        if hasattr(type(module), "update") and "_defaults" in own:  # a metric of torchmetrics
            entries = {k: own[k] for k in (*own["_defaults"], "_update_count") if k in own}
        elif not reason(module, self._known):
            entries = {k: v for k, v in own.items() if k not in _OF_MODULE and k not in left_out}
        elif is_saved and not type(module).__module__.startswith(_WRAPPERS):
            kinds = (bool, int, float, str)
            entries = {k: v for k, v in own.items() if type(v) in kinds and k[:1] != "_"}
        buffers, parameters = own["_buffers"], own["_parameters"]
        is_left_out = is_saved and not self._all_buffers
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
            modes = self._modes
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
        looks = look_at(others) if others else {}
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


def _put_in_list(base: Any, thing: Any, number: int, value: Any) -> None:
    """Also behind the end; where objects before it are missing it has no place."""
    if number < base.__len__(thing):
        base.__setitem__(thing, number, value)
    elif number == base.__len__(thing):
        base.append(thing, value)


def no_put(name: Any, value: Any) -> None:
    """In a tuple only what is changed in place comes back."""


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function and the functions in it name."""
    inner = (names_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return tuple(dict.fromkeys(itertools.chain(code.co_names, *inner)))


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


# --- forms
# ------------------------------------------------------------------------------------------------


def form_of(value: Any, *, depth: int = 0) -> Any:
    """What a checkpoint can hold of it, mostly itself; :data:`NONE` if it cannot. Of these types
    themselves: a subclass would come back as another."""
    kind = type(value)
    if kind in LEAVES:
        return value
    if isinstance(value, torch.Tensor):
        return value if is_dense(value) else NONE
    if isinstance(value, np.generic) or kind is np.ndarray:
        return value if value.dtype.kind in NUMPY_KINDS else NONE
    if kind is itertools.count:
        return TAG, "count", ast.literal_eval(f"({repr(value)[6:-1]},)")
    if depth == 0 and isinstance(value, rng.KINDS) and not isinstance(value, random.SystemRandom):
        return TAG, "generator", (kind.__name__, rng.state_of(value))
    if isinstance(value, enum.Enum):
        name = object.__getattribute__(value, "_name_")
        is_found = vars(kind)["_member_map_"].get(name) is value and class_at(_name(kind)) is kind
        return (TAG, "enum", (_name(kind), name)) if is_found else NONE
    if depth == _MOST_DEPTH:
        return NONE
    if kind is Counter:
        return value if is_flat([*value, *value.values()]) else NONE
    if kind in (dict, OrderedDict, defaultdict):
        keys, ones = list(value), list(value.values())
        forms = form_of(keys, depth=depth), form_of(ones, depth=depth)
        if any(one is NONE for one in forms) or any(isinstance(k, torch.Tensor) for k in keys):
            return NONE
        is_same = forms[0] is keys and forms[1] is ones and type(like(value, {})) is kind
        return value if is_same else like(value, dict(zip(*forms, strict=True)))
    if kind in MANY:
        if is_flat(value):
            return NONE if kind is tuple and value[:1] == (TAG,) else value
        found = [form_of(one, depth=depth + 1) for one in value]
        if any(one is NONE for one in found):
            return NONE
        is_same = all(a is b for a, b in zip(found, value, strict=True))
        return value if is_same else like(value, found)
    if isinstance(value, tuple) and hasattr(kind, "_fields") and class_at(_name(kind)) is kind:
        found = form_of(tuple(value), depth=depth)
        return NONE if found is NONE else (TAG, "named tuple", (_name(kind), found))
    return NONE


def is_plain(value: Any) -> bool:
    """Whether a checkpoint holds it as it is."""
    return form_of(value) is value


class Look(NamedTuple):
    """One look at a value.

    Attributes:
        form: what a checkpoint can hold of it; :data:`NONE` of a large container, too, whose form
            is made only if it is to be saved.
        mark: what shows whether it has changed: its form; of what is too large to be copied, and
            may never change, a sample; of what no checkpoint can hold, a mark, or NONE.
        tensors: those in it, but for a large container's.
    """

    form: Any
    mark: Any
    is_large: bool
    tensors: list[torch.Tensor]


def look_at(values: Mapping[Any, Any]) -> dict[Any, Look]:
    """Look at some values, by their names."""
    return {name: _look(value) for name, value in values.items()}


def _look(value: Any) -> Look:
    is_array = isinstance(value, (torch.Tensor, np.ndarray))
    is_many = isinstance(value, (dict, *MANY)) and len(value) > LARGE
    form = NONE if is_many else form_of(value)
    is_large = is_many or (is_array and form is not NONE and value.nbytes > _LARGE_BYTES)
    mark = _mark_of(value, is_large=is_large) if is_large or form is NONE else form
    return Look(form, mark, is_large, [] if is_many or mark is NONE else tensors_in(value))


def shown_key(name: Any) -> str:
    """The form of a key, as a person writes it."""
    return str(name[2][1] if is_tagged(name) else repr(name))


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def class_at(name: str) -> Any:
    """A class that some module of this process has; None if none has it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
    return found


def is_tagged(form: Any) -> bool:
    return type(form) is tuple and len(form) == 3 and type(form[0]) is str and form[0] == TAG


def is_flat(value: Any) -> bool:
    """Whether it holds numbers and words only, such as the losses of all steps."""
    return isinstance(value, MANY) and FLAT.issuperset(map(type, value))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values are simply numbers in memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta or is_lazy(tensor))
    )


def like(value: Any, entries: Any) -> Any:
    """A container of this kind, as far as its kind can be saved."""
    if isinstance(value, deque):
        return deque(entries, maxlen=value.maxlen)
    if isinstance(value, defaultdict) and value.default_factory in FACTORIES.values():
        return defaultdict(value.default_factory, entries)
    kinds = (tuple, set, frozenset, OrderedDict, Counter)
    return next((kind(entries) for kind in kinds if isinstance(value, kind)), entries)


def arrays_in(value: Any) -> list[Any]:
    """All tensors and arrays in a plain value."""
    leaves = tree_leaves(value, is_leaf=is_flat)
    return [one for one in leaves if isinstance(one, (torch.Tensor, np.ndarray))]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in a plain value."""
    return [one for one in arrays_in(value) if isinstance(one, torch.Tensor)]


# --- what shows that a value has changed
# ------------------------------------------------------------------------------------------------


def _mark_of(value: Any, *, is_large: bool) -> Any:
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            if is_lazy(value) or value.is_meta:
                return NONE
            flat = value.detach().view(-1) if is_large and value.is_contiguous() else torch.empty(0)
            version = None if value.is_inference() else value._version  # without .data's writes
            return id(value), version, flat[:: max(1, flat.numel() // _SAMPLED)]
    if type(value) is np.ndarray and value.dtype.kind == "O":
        return tuple(map(id, value.reshape(-1)[:LARGE]))
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return _sum_of(value) if value.flags.writeable else id(value)
    if is_large:
        step = max(1, len(value) // _SAMPLED)
        entries = value.values() if isinstance(value, Mapping) else value
        sampled = value[::step] if isinstance(value, (list, tuple)) else entries
        return len(value), [id(one) for one in itertools.islice(sampled, 2 * _SAMPLED)]
    is_told = isinstance(value, (set, frozenset, enum.Enum)) or is_iterator(type(value))
    return _place_of(value) if is_told else NONE


def _place_of(value: Any) -> object:
    """What tells whether an iterator has moved, and what it reads; NONE of a run's own."""
    if isinstance(value, rng.KINDS):
        return rng.state_of(value)
    if isinstance(value, (dict, *MANY)):
        return id(value), len(value)
    if not is_iterator(type(value)):
        return value if type(value) in FLAT else id(value)
    if type(value) is types.GeneratorType:
        frame = value.gi_frame
        if value.gi_running or (frame and "hydroslurm" in frame.f_code.co_filename):
            return NONE
        if frame is None:
            return "at its end"
        local = frame.f_locals
        parts = [frame.f_lasti, value.gi_yieldfrom, *(local[name] for name in sorted(local))]
        held = (*gc.get_referents(value), *gc.get_referents(frame))
        parts += [one for one in held if is_iterator(type(one))]
        if hasattr(local, "clear"):  # before Python 3.13 a copy, which the frame keeps
            local.clear()
        # of a loader that a run follows: what is read goes on where it stood
        kinds = [kind for one in parts for kind in type(one).__mro__]
        is_ours = any(kind.__module__.startswith("hydroslurm.integrations") for kind in kinds)
        return NONE if is_ours else tuple(map(_place_of, parts))
    inner = [one for one in gc.get_referents(value) if not isinstance(one, type)]
    inner += [each for one in inner if type(one) is tuple for each in one]  # of a zip
    places = [_place_of(one) for one in inner]
    hint = value.__length_hint__() if hasattr(value, "__length_hint__") else None
    return NONE if any(one is NONE for one in places) else (hint, *places)


def _is_iterator(kind: Any) -> bool:
    """Whether it is one of Python's own, or a generator."""
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")


is_iterator: Callable[[type], bool] = functools.lru_cache(maxsize=4096)(_is_iterator)


def _sum_of(array: Any) -> int:
    """Of all bytes, or of many pieces from one end to the other."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    step = max(1, flat.nbytes // _SAMPLED)
    piece, found = 2048 if flat.nbytes > 8 * _LARGE_BYTES else step, 0
    for start in range(0, flat.nbytes, step):
        found = zlib.crc32(flat[start : start + piece].data, found)
    return found
