"""Forms: what a checkpoint can hold of the values of a script. A form has the same tensors; what
:mod:`hydroslurm.checkpoint.tree` does not know is ``(TAG, name, body)`` in it. An enum's member and
a named tuple are made of the class that the script has by then: nothing is imported or called.
"""

from __future__ import annotations

import ast
import copy
import datetime
import enum
import functools
import itertools
import pathlib
import random
import sys
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

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
