"""Walks a state again that was walked before, in a third of the time, while it looks the same.
Pure.

Naming thousands of small tensors takes longer than copying them, and the training waits for both.
From save to save only their values change, and a few numbers such as a learning rate: so the names
and the tree of the last walk are kept, and what makes them valid is compared for all tensors at
once, by functions that Python calls without a loop of its own.
"""

from __future__ import annotations

import marshal
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from hydroslurm.checkpoint.tree import JsonValue, encode, tensor_keys

MOST_DEPTH = 10
"""Of containers around tensors. A deeper state is walked as if it were the first time."""

_TENSOR = torch.Tensor
_layout_of, _dtype_of, _device_of = attrgetter("layout"), attrgetter("dtype"), attrgetter("device")
_shape_of, _needs_grad = attrgetter("shape"), attrgetter("requires_grad")

_Child: TypeAlias = "_Node | str | None"
"""A container with tensors; the place of something without; a tensor."""


class _Node(NamedTuple):
    """A container with tensors, as it was.

    Attributes:
        keys: with their types, because True is 1; of a sequence none.
        metadata: of a module's state_dict.
        children: empty: all of them are tensors.
        bodies: what they were encoded to.
        make: encodes it, from its children's bodies; None: as before, nothing in it can change.
        encoded: as before.
    """

    kind: type[Any]
    size: int
    keys: tuple[Any, ...] | None
    key_kinds: tuple[type, ...]
    metadata: bytes
    children: tuple[_Child, ...]
    bodies: tuple[JsonValue, ...]
    make: Callable[[list[JsonValue]], JsonValue] | None
    encoded: JsonValue


class NoOutlineError(Exception):
    """A tree has none, or does not look like its outline."""


class Outline:
    """What was learned of a tree when it was encoded."""

    def __init__(self, tree: Mapping[str, Any], encoded: JsonValue, *, prefix: str) -> None:
        """
        Args:
            encoded: what ``tree.encode`` made of it with this prefix.

        Raises:
            NoOutlineError: it must be encoded each time.
        """
        keys: list[str] = []
        self._root = _learn(tree, encoded, prefix, depth=1, keys=keys)
        tensors: list[torch.Tensor] = []
        _walk(tree, self._root, tensors)
        shapes, *others = _look(tensors)
        same: dict[Any, Any] = {}  # it is kept, and of thousands of shapes few differ
        self._looks = ([same.setdefault(one, one) for one in shapes], *others)
        self._shared = _shared_memory(tensors)
        firsts = {key: place for place, key in reversed(tuple(enumerate(keys)))}
        self._firsts = array("q", sorted(firsts.values()))

    def again(self, tree: Mapping[str, Any]) -> tuple[JsonValue, list[torch.Tensor]] | None:
        """What ``tree.encode`` makes of a tree, the tensors in the order of their keys, which are
        those of the last time; None if it does not look like that one.

        Raises:
            UnsavableState: something else than the tensors cannot be saved.
        """
        tensors: list[torch.Tensor] = []
        try:
            encoded = _walk(tree, self._root, tensors)
            if _look(tensors) != self._looks or _shared_memory(tensors) != self._shared:
                return None
        except NoOutlineError:
            return None
        if len(self._firsts) != len(tensors):
            tensors = [tensors[place] for place in self._firsts]
        return encoded, tensors


def _learn(value: Any, encoded: JsonValue, path: str, *, depth: int, keys: list[str]) -> _Child:
    """Raises NoOutlineError."""
    kind = type(value)
    if kind is _TENSOR:
        keys.append(encoded["$tensor"])  # type: ignore[index,call-overload]
        return None
    if kind not in _BODIES:
        if tensor_keys(encoded):
            raise NoOutlineError(f"{path} holds tensors in a {kind.__name__}")
        return path
    if not value:
        return path
    if depth > MOST_DEPTH:
        raise NoOutlineError(f"{path} is too deep")
    pairs, make = _BODIES[kind](encoded)
    names, values = (tuple(value), value.values()) if isinstance(value, dict) else (None, value)
    children = tuple(
        _learn(one, body, f"{path}.{name}", depth=depth + 1, keys=keys)
        for (name, body), one in zip(pairs, values, strict=True)
    )
    if all(isinstance(one, str) for one in children):
        return path
    is_pure = all(one is None or (isinstance(one, _Node) and not one.make) for one in children)
    return _Node(
        kind=kind,
        size=len(children),
        keys=names,
        key_kinds=tuple(map(type, names or ())),
        metadata=_frozen(value),
        children=() if all(one is None for one in children) else children,
        bodies=tuple(body for _, body in pairs),
        make=None if is_pure else make,
        encoded=encoded,
    )


def _walk(value: Any, node: _Child, tensors: list[torch.Tensor]) -> JsonValue:
    """What it is encoded to. Raises NoOutlineError, UnsavableState."""
    if not isinstance(node, _Node):
        raise NoOutlineError("there are no tensors")
    kind, size, keys, key_kinds, metadata, children, bodies, make, encoded = node
    if type(value) is not kind or len(value) != size:
        raise NoOutlineError("it has changed")
    values: Any = value
    if keys is not None:
        if tuple(value) != keys or tuple(map(type, value)) != key_kinds:
            raise NoOutlineError("it has changed")
        values = value.values()
        if kind is OrderedDict and _frozen(value) != metadata:
            raise NoOutlineError("it has changed")
    if not children:
        tensors.extend(values)
        return encoded
    parts = []
    for child, one, body in zip(children, values, bodies, strict=True):
        if child is None:
            tensors.append(one)
            parts.append(body)
        elif isinstance(child, str):
            part, found = encode(one, prefix=child)
            if found:
                raise NoOutlineError("it has changed")
            parts.append(part)
        else:
            parts.append(_walk(one, child, tensors))
    return encoded if make is None else make(parts)


def _look(tensors: Sequence[Any]) -> tuple[list[Any], ...]:
    """What the encoding of tensors depends on.

    Raises:
        NoOutlineError: the values of one are not simply numbers in memory.
    """
    flags = (_needs_grad, _TENSOR.is_neg, _TENSOR.is_conj)
    if (
        set(map(type, tensors)) != {_TENSOR}
        or set(map(_layout_of, tensors)) != {torch.strided}
        or any(any(map(flag, tensors)) for flag in flags)
    ):
        raise NoOutlineError("there are tensors of a kind of their own")
    whole = all(map(_TENSOR.is_contiguous, tensors))
    strides = [] if whole else list(map(_TENSOR.stride, tensors))
    return (
        list(map(_shape_of, tensors)),
        list(map(_dtype_of, tensors)),
        list(map(_device_of, tensors)),
        strides,
    )


def _shared_memory(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Of each tensor the first one that is at the same address; None if each has its own."""
    addresses = list(map(_TENSOR.data_ptr, tensors))
    firsts = dict(zip(reversed(addresses), range(len(addresses) - 1, -1, -1), strict=True))
    if len(firsts) == len(addresses):
        return None
    return list(map(firsts.__getitem__, addresses))


def _frozen(value: Any) -> bytes:
    """The ``_metadata`` of a module's state_dict, comparable with the types of all it holds.
    Raises NoOutlineError."""
    metadata = getattr(value, "_metadata", None)
    if metadata is None:
        return b""
    try:
        # without references (version 2): they depend on which objects happen to be the same one
        return marshal.dumps(list(metadata.items()), 2)
    except (ValueError, AttributeError) as error:
        raise NoOutlineError("its _metadata is not plain") from error


_Pairs: TypeAlias = "list[tuple[Any, JsonValue]]"
_Body: TypeAlias = "tuple[_Pairs, Callable[[list[JsonValue]], JsonValue]]"


def _of_dict(encoded: Any) -> _Body:
    if "$dict" in encoded:
        pairs = encoded["$dict"]
        return pairs, lambda parts: {"$dict": _paired(pairs, parts)}
    keys = tuple(encoded)
    return list(encoded.items()), lambda parts: dict(zip(keys, parts, strict=True))


def _of_ordered(encoded: Any) -> _Body:
    pairs, metadata = encoded["$ordered"]
    return pairs, lambda parts: {"$ordered": [_paired(pairs, parts), metadata]}


def _of_list(encoded: Any) -> _Body:
    return list(enumerate(encoded)), lambda parts: parts


def _of_tuple(encoded: Any) -> _Body:
    return list(enumerate(encoded["$tuple"])), lambda parts: {"$tuple": parts}


def _paired(pairs: Iterable[Any], parts: Iterable[JsonValue]) -> list[JsonValue]:
    return [[key, part] for (key, _), part in zip(pairs, parts, strict=True)]


_BODIES: Mapping[type, Callable[[Any], _Body]] = {
    dict: _of_dict,
    OrderedDict: _of_ordered,
    list: _of_list,
    tuple: _of_tuple,
}
"""A container -> its keys and what is in it, and the way back."""
