"""Forms: what a checkpoint can hold of the values of a script, and what shows that one has changed.
A form has the same tensors; what :mod:`hydroslurm.checkpoint.tree` does not know is
``(TAG, name, body)`` in it. An enum's member and a named tuple are made of the class that the
script has by then: nothing is imported or called.
"""

from __future__ import annotations

import ast
import copy
import datetime
import enum
import functools
import gc
import itertools
import pathlib
import random
import sys
import types
import zlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.tree import FACTORIES, LEAVES, NUMPY_KINDS
from hydroslurm.errors import StateMismatch

NONE = object()
"""In the place of a form: no checkpoint can hold it."""
TAG = "$as"
FLAT = frozenset((bool, int, float, complex, str, type(None), bytes))
MANY = (list, tuple, deque, set, frozenset)
_MUTABLE = (list, deque, set, Counter, np.ndarray, bytearray, array)
_MOST_DEPTH = 5
LARGE = 10_000
_LARGE_BYTES, _SAMPLED = 2**20, 512

OF_PROCESS = (float, str, pathlib.PurePath, datetime.date, datetime.time)
"""Numbers of seconds, texts, paths and times may be of the process that has set them."""


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
        is_found = vars(kind)["_member_map_"].get(name) is value and _class_at(_name(kind)) is kind
        return (TAG, "enum", (_name(kind), name)) if is_found else NONE
    if depth == _MOST_DEPTH:
        return NONE
    if kind is Counter:
        return value if _is_flat([*value, *value.values()]) else NONE
    if kind in (dict, OrderedDict, defaultdict):
        keys, ones = list(value), list(value.values())
        forms = form_of(keys, depth=depth), form_of(ones, depth=depth)
        if any(one is NONE for one in forms) or any(isinstance(k, torch.Tensor) for k in keys):
            return NONE
        is_same = forms[0] is keys and forms[1] is ones and type(_like(value, {})) is kind
        return value if is_same else _like(value, dict(zip(*forms, strict=True)))
    if kind in MANY:
        if _is_flat(value):
            return NONE if kind is tuple and value[:1] == (TAG,) else value
        found = [form_of(one, depth=depth + 1) for one in value]
        if any(one is NONE for one in found):
            return NONE
        is_same = all(a is b for a, b in zip(found, value, strict=True))
        return value if is_same else _like(value, found)
    if isinstance(value, tuple) and hasattr(kind, "_fields") and _class_at(_name(kind)) is kind:
        found = form_of(tuple(value), depth=depth)
        return NONE if found is NONE else (TAG, "named tuple", (_name(kind), found))
    return NONE


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


def look(values: Mapping[Any, Any]) -> dict[Any, Look]:
    """Look at some values, by their names."""
    return {name: _look_at(value) for name, value in values.items()}


def _look_at(value: Any) -> Look:
    is_array = isinstance(value, (torch.Tensor, np.ndarray))
    is_many = isinstance(value, (dict, *MANY)) and len(value) > LARGE
    form = NONE if is_many else form_of(value)
    is_large = is_many or (is_array and form is not NONE and value.nbytes > _LARGE_BYTES)
    mark = _mark_of(value, is_large=is_large) if is_large or form is NONE else form
    return Look(form, mark, is_large, [] if is_many or mark is NONE else tensors_in(value))


def differing(marks: Mapping[Any, Any], before: Mapping[Any, Any]) -> set[Any]:
    """The names whose marks are not what they were."""
    return {
        name
        for name, mark in marks.items()
        if (was := before.get(name, NONE)) is NONE or not equal(mark, was)
    }


def is_plain(value: Any) -> bool:
    """Whether a checkpoint holds it as it is."""
    return form_of(value) is value


def shown(name: Any) -> str:
    """The form of a key, as a person writes it."""
    return str(name[2][1] if _is_tagged(name) else repr(name))


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_at(name: str) -> Any:
    """A class that some module of this process has; None if none has it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
    return found


def _is_tagged(form: Any) -> bool:
    return type(form) is tuple and len(form) == 3 and type(form[0]) is str and form[0] == TAG


def _made(here: Any, name: str, body: Any, device: torch.device | None) -> Any:
    """The value that a tagged form is of."""
    if name == "count":
        return itertools.count(*body)
    if name == "generator":
        if not isinstance(here, rng.KINDS):
            return rng.made_from(*body)
        rng.set_state(here, body[1])
        return here
    kind = _class_at(body[0])
    if name == "enum" and isinstance(kind, enum.EnumMeta):
        if (member := vars(kind)["_member_map_"].get(body[1])) is not None:
            return member
    elif name == "named tuple" and isinstance(kind, type) and issubclass(kind, tuple):
        there = here if type(here) is kind and len(here) == len(body[1]) else (None,) * len(body[1])
        return tuple.__new__(kind, map(functools.partial(put, device=device), there, body[1]))
    raise StateMismatch(
        f"what was saved is of {body[0].replace(':', '.')} ({name}), and this script has no such "
        "class, or no such member of it: give it back, or begin a new run"
    )


def _is_flat(value: Any) -> bool:
    """Whether it holds numbers and words only, such as the losses of all steps."""
    return isinstance(value, MANY) and FLAT.issuperset(map(type, value))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values are simply numbers in memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta or is_lazy(tensor))
    )


def equal(one: Any, other: Any) -> bool:
    """Of two forms."""
    (ours, tree), (theirs, other_tree) = (tree_flatten(it, is_leaf=_is_flat) for it in (one, other))
    return tree == other_tree and all(map(_equal_leaves, ours, theirs))


def _equal_leaves(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_like = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return is_like and torch.equal(one, other)
    return type(one) is type(other) and bool(
        np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
    )


def copied(value: Any) -> Any:
    """A copy of tensors, numbers and containers."""
    return tree_map(_copy_of_leaf, value, is_leaf=_is_flat)


def _copy_of_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, _MUTABLE) else value


def _like(value: Any, entries: Any) -> Any:
    """A container of this kind, as far as its kind can be saved."""
    if isinstance(value, deque):
        return deque(entries, maxlen=value.maxlen)
    if isinstance(value, defaultdict) and value.default_factory in FACTORIES.values():
        return defaultdict(value.default_factory, entries)
    kinds = (tuple, set, frozenset, OrderedDict, Counter)
    return next((kind(entries) for kind in kinds if isinstance(value, kind)), entries)


def arrays_in(value: Any) -> list[Any]:
    """All tensors and arrays in a plain value."""
    leaves = tree_leaves(value, is_leaf=_is_flat)
    return [one for one in leaves if isinstance(one, (torch.Tensor, np.ndarray))]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in a plain value."""
    return [one for one in arrays_in(value) if isinstance(one, torch.Tensor)]


def put(here: Any, value: Any, *, device: torch.device | None) -> Any:
    """The saved value in the place of what is here: in the same containers, the same tensor.

    Args:
        device: for tensors that are not here yet.

    Raises:
        StateMismatch: the script has no such class any more.
    """
    if isinstance(value, torch.Tensor):
        if _is_trained(here) and here.shape == value.shape:
            here.detach().copy_(value)  # an optimizer has it
            return here
        if not isinstance(here, torch.Tensor):
            return value if device is None else value.to(device)
        if here.shape == value.shape and here.dtype == value.dtype and not here.requires_grad:
            return here.copy_(value)
        return value.to(here.device)
    if _is_tagged(value):
        return _made(here, value[1], value[2], device)
    if isinstance(value, Mapping):
        into = here if isinstance(here, dict) else _like(value, {})
        # a key that is not here yet has what a defaultdict makes for it, such as a bounded deque
        make = getattr(here, "default_factory", None) if isinstance(here, defaultdict) else None
        made = {}
        for form, one in value.items():
            key = put(None, form, device=None)
            made[key] = put(into[key] if key in into else make and make(), one, device=device)
        into.clear()
        into.update(made)
        return into
    if isinstance(value, MANY) and not isinstance(value, torch.Size):
        is_same = isinstance(here, (list, tuple, deque)) and not isinstance(value, (set, frozenset))
        there = list(here) if is_same and len(here) == len(value) else [None] * len(value)
        entries = [
            put(one if _is_trained(one) else None, saved, device=device)
            for one, saved in zip(there, value, strict=True)
        ]
        if type(here) is type(value) and isinstance(here, (list, deque, set)):
            here.clear()
            (here.update if isinstance(here, set) else here.extend)(entries)
            return here
        return _like(here if is_same else value, entries)
    return value


def _is_trained(here: Any) -> bool:
    """Whether an optimizer may have it, so that it has to stay."""
    return isinstance(here, torch.Tensor) and here.requires_grad and here.is_leaf


def apart(here: Any) -> Any:
    """For a value that is not to be put into what is here."""
    if isinstance(here, torch.Tensor):
        return here if _is_trained(here) or type(here) is torch.nn.Parameter else None
    return copy.copy(here) if isinstance(here, (dict, *MANY)) else here


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
