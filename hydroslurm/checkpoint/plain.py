"""Plain values: numbers, words, tensors and containers of them, which can be compared, copied,
saved and put back."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hydroslurm.checkpoint.tree import FACTORIES

_NUMBERS = (int, float, complex)
SIMPLE = (bool, str, type(None))
_WORDS = (torch.dtype, torch.device, torch.Size)
MANY = (list, tuple, deque, set)
_FLAT = frozenset((*_NUMBERS, *SIMPLE))
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_MOST_DEPTH = 5


def is_plain(value: Any, *, depth: int = 0) -> bool:
    """Whether it is a number, a string, None or a tensor, or a container of such. Of these types
    themselves: an enum or a named tuple would come back as something else."""
    if isinstance(value, torch.Tensor):
        return is_dense(value)
    if isinstance(value, (np.ndarray, np.generic)):
        is_array = isinstance(value, np.generic) or type(value) is np.ndarray
        return is_array and value.dtype.kind in "biufcSU"
    kind = type(value)
    if kind in (*_NUMBERS, *SIMPLE, *_WORDS):
        return True
    if depth == _MOST_DEPTH:
        return False
    if kind in _MAPPINGS:
        return all(
            isinstance(key, (str, int, float, tuple, *_WORDS))
            and is_plain(key, depth=depth + 1)
            and is_plain(one, depth=depth + 1)
            for key, one in value.items()
        )
    return kind in MANY and (
        _is_flat(value) or all(is_plain(one, depth=depth + 1) for one in value)
    )


def _is_flat(value: Any) -> bool:
    """Whether it holds numbers and words only: the losses of all steps, which are not looked at one
    by one for each save."""
    return isinstance(value, MANY) and _FLAT.issuperset(map(type, value))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values are simply numbers in memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta or is_lazy(tensor))
    )


def equal(one: Any, other: Any) -> bool:
    """Of two plain values."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return (
            both
            and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
            and bool(torch.equal(one, other))
        )
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return type(one) is type(other) and bool(np.array_equal(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def plain(value: Any) -> Any:
    """A copy of tensors, numbers and containers."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return _mapping_like(value, {key: plain(one) for key, one in value.items()})
    if isinstance(value, set):
        return set(value)
    if isinstance(value, torch.Size):
        return value
    if _is_flat(value):
        return _like(value, list(value))
    if isinstance(value, MANY):
        return _like(value, [plain(one) for one in value])
    if isinstance(value, float):
        return float(value)  # numpy's are floats too
    return value


def _mapping_like(value: Any, entries: dict[Any, Any]) -> Any:
    """A mapping of this kind, as far as its kind can be saved."""
    if isinstance(value, defaultdict) and value.default_factory in FACTORIES.values():
        return defaultdict(value.default_factory, entries)
    return type(value)(entries) if type(value) in (OrderedDict, Counter) else entries


def _like(value: Any, entries: list[Any]) -> Any:
    """A container of this kind."""
    if isinstance(value, deque):
        return deque(entries, maxlen=value.maxlen)
    return tuple(entries) if isinstance(value, tuple) else entries


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All of them in a plain value; of arrays one."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, np.ndarray):
        yield torch.empty(0)
    elif isinstance(value, (Mapping, *MANY)) and not _is_flat(value):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one)


def size_bytes(value: Any) -> int:
    """The bytes of its tensors and arrays."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes
    if isinstance(value, (Mapping, *MANY)):
        return sum(map(size_bytes, value.values() if isinstance(value, Mapping) else value))
    return 0


def put(here: Any, value: Any, *, device: torch.device | None) -> Any:
    """The saved value in the form of what is here: the same containers, the same tensor.

    Args:
        device: for tensors that are not here yet.
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
    if isinstance(here, dict) and isinstance(value, Mapping):
        # a key that is not here yet has what a defaultdict makes for it, such as a bounded deque
        make = getattr(here, "default_factory", None) if isinstance(here, defaultdict) else None
        made = {
            key: put(here[key] if key in here else make and make(), one, device=device)
            for key, one in value.items()
        }
        here.clear()
        here.update(made)
        return here
    if isinstance(value, (list, tuple, deque)) and not isinstance(value, torch.Size):
        is_same = isinstance(here, (list, tuple, deque))
        there = list(here) if is_same and len(here) == len(value) else [None] * len(value)
        entries = [
            put(one if _is_trained(one) else None, saved, device=device)
            for one, saved in zip(there, value, strict=True)
        ]
        if type(here) is type(value) and isinstance(here, (list, deque)):
            here.clear()
            here.extend(entries)
            return here
        return _like(here if is_same else value, entries)
    if isinstance(here, set) and isinstance(value, set):
        here.clear()
        here.update(value)
        return here
    if isinstance(value, Mapping):
        return _mapping_like(
            value, {key: put(None, one, device=device) for key, one in value.items()}
        )
    return value


def _is_trained(here: Any) -> bool:
    """Whether an optimizer may have it, so that it has to stay."""
    return isinstance(here, torch.Tensor) and here.requires_grad and here.is_leaf


def form_of(here: Any) -> Any:
    """For a value that is not to be put into what is here."""
    if isinstance(here, torch.Tensor):
        return here if _is_trained(here) else None
    return copy.copy(here) if isinstance(here, (dict, *MANY)) else here
