"""A tree of state <-> JSON with references to tensors. Pure.

What JSON cannot say is an object with one key that begins with ``$``::

    {"$tensor": "shared/model/fc.weight"}          the tensor of that key, which is stored elsewhere
    {"$tuple": [...]}  {"$set": [...]}             containers that are not lists
    {"$dict": [[key, value], ...]}                 keys that are no strings, or begin with "$"
    {"$int": "0x..."}  {"$float": "7ff0..."}       what a JSON reader elsewhere would round

Decoding builds values of the types below and of no others: a tag chooses from a fixed table, and
nothing is imported, called by name or unpickled. That is why checkpoints can be read from anyone.
"""

from __future__ import annotations

import base64
import datetime
import math
import pathlib
import struct
import uuid
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hydroslurm.errors import CheckpointCorrupt, UnsavableState

JsonValue: TypeAlias = "bool | int | float | str | list[Any] | dict[str, Any] | None"

EXACT_INT_BITS = 63
MOST_DEPTH = 150
"""Containers inside one another. Each takes up to four levels of JSON, of which a reader accepts a
limited number."""

NUMPY_KINDS = "biufcSUmM"
"""All but object arrays and structured ones."""

FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)
}
"""What a defaultdict may make its values with."""


def encode(tree: Any, *, prefix: str) -> tuple[JsonValue, dict[str, torch.Tensor]]:
    """Take the tensors out of a tree.

    Containers and scalars of Python, numpy and torch come back as exactly the types they were:
    OrderedDict (with the ``_metadata`` that modules put on their state_dict), Counter and
    defaultdict too. A tensor comes back on the CPU, as a plain Tensor (Parameters included), with
    its strides when it is dense; tensors that view the same memory in the same way are stored once.

    Args:
        tree: state_dicts, nested as they like.
        prefix: begins the key of every tensor, as in ``shared/model/fc.weight``.

    Returns:
        What :func:`decode` takes. The tensors are the caller's own, not copies.

    Raises:
        UnsavableState: names the place and the type of the first object that is none of these.
    """
    encoder = _Encoder(prefix)
    try:
        return encoder.encode(tree, prefix), encoder.tensors
    except RecursionError:
        raise UnsavableState(
            f"{prefix} is nested too deeply to be saved. Keep the state flat: "
            "a state_dict of plain values and tensors"
        ) from None


def decode(encoded: JsonValue, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put a tree together again.

    Raises:
        CheckpointCorrupt: a tag that no version wrote, or a tensor that is not there.
    """
    try:
        return _decode(encoded, tensors)
    except CheckpointCorrupt:
        raise
    except Exception as error:
        raise _corrupt(error) from error


def tensor_keys(encoded: JsonValue, like: Any = None) -> dict[str, torch.Tensor | None]:
    """The keys of all tensors in an encoded tree -> the DTensor whose layout each of them gets.

    Args:
        like: a tree like the encoded one, or a coarser one. A DTensor where that has a tensor is
            for this tensor; a DTensor where it has a container is for every tensor in there
            (optimizers: in a process that has just begun they have no state yet, but for every
            parameter there will be tensors of its shape). None for the others, which stay whole.

    Raises:
        CheckpointCorrupt: a container that no version wrote.
    """
    found: dict[str, torch.Tensor | None] = {}
    todo: list[tuple[JsonValue, Any]] = [(encoded, like)]
    try:
        while todo:
            value, template = todo.pop()
            if isinstance(value, dict) and "$tensor" in value:
                key = str(value["$tensor"])
                found[key] = template if is_dtensor(template) else found.get(key)
            else:
                todo.extend(_children(value, template))
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise _corrupt(error) from error
    return found


def like_of(thing: Any) -> Any:
    """The ``like`` for the state of an object: of an optimizer its parameters, by their number in
    its state_dict; of a module its state_dict; of anything else none."""
    if isinstance(thing, torch.optim.Optimizer):
        parameters = [one for group in thing.param_groups for one in group["params"]]
        return {"state": dict(enumerate(parameters))}
    return thing.state_dict() if isinstance(thing, torch.nn.Module) else None


def is_dtensor(value: Any) -> bool:
    """Whether it is torch's distributed tensor, which is not imported for the question."""
    return type(value).__name__ == "DTensor" and isinstance(value, torch.Tensor)


def dtensors_in(tensors: Mapping[str, Any]) -> set[str]:
    """The keys of those that are distributed."""
    return {key for key, one in tensors.items() if is_dtensor(one)}


def local_of(tensor: Any) -> Any:
    """What this rank has of a distributed tensor; any other one itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


class _Encoder:
    """One walk over a tree. ``path`` is how a person would write the place in Python."""

    def __init__(self, prefix: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._dotted, self._slashed = prefix + ".", prefix + "/"
        self._at: dict[int, tuple[str, ...]] = {}
        self._open: set[int] = set()

    def encode(self, value: Any, path: str) -> JsonValue:
        kind = type(value)
        if kind is torch.Tensor:  # nearly all values are: the training waits for this walk
            return self._tensor(value, path)
        if value is None or kind is str or kind is bool:
            return value  # type: ignore[no-any-return]
        if kind is int and value.bit_length() <= EXACT_INT_BITS:
            return value  # type: ignore[no-any-return]
        if kind is float and math.isfinite(value):
            return value  # type: ignore[no-any-return]
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.generic) and value.dtype.kind in NUMPY_KINDS:
            kind = np.generic
        if kind in _LEAVES:
            tag, to_json, _ = _LEAVES[kind]
            return {tag: to_json(value)}
        if id(value) in self._open:
            raise UnsavableState(f"{path} contains itself; a checkpoint holds trees only")
        if len(self._open) == MOST_DEPTH:
            raise RecursionError
        self._open.add(id(value))
        try:
            return self._container(value, path)
        finally:
            self._open.remove(id(value))

    def _container(self, value: Any, path: str) -> JsonValue:
        kind = type(value)
        if kind is list:
            return self._items(value, path)
        if kind is dict:
            if not all(type(key) is str and key[:1] != "$" for key in value):
                return {"$dict": self._pairs(value, path)}
            return {key: self.encode(one, f"{path}.{key}") for key, one in value.items()}
        if kind in (tuple, set, frozenset):
            return {f"${kind.__name__}": self._items(value, path)}
        if kind is deque:
            return {"$deque": [self._items(value, path), value.maxlen]}
        if kind is OrderedDict:
            pairs, metadata = self._pairs(value, path), getattr(value, "_metadata", None)
            return {"$ordered": [pairs, self.encode(metadata, f"{path}._metadata")]}
        if kind is Counter:
            return {"$counter": self._pairs(value, path)}
        if kind is defaultdict:
            return {"$defaultdict": [_factory(value, path), self._pairs(value, path)]}
        if kind is np.ndarray and value.dtype.kind in NUMPY_KINDS:
            raw = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
            return {"$ndarray": [value.dtype.str, list(value.shape), self._tensor(raw, path)]}
        raise _unsavable(value, path)

    def _items(self, values: Iterable[Any], path: str) -> list[JsonValue]:
        return [self.encode(one, f"{path}[{place}]") for place, one in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[JsonValue]:
        return [
            [
                self.encode(key, f"{path}, key {key!r}"),
                self.encode(one, f"{path}.{key}" if type(key) is str else f"{path}[{key!r}]"),
            ]
            for key, one in value.items()
        ]

    def _tensor(self, tensor: torch.Tensor, path: str) -> JsonValue:
        tensor = _plain(tensor, path)
        # By address first: hashing all that makes two tensors equal takes three times as long.
        address = _address(tensor)
        here = self._at.get(address)
        key = None
        if here:
            key = next((one for one in here if _alike(self.tensors[one], tensor)), None)
        if key is None:
            # a "." and a "[" in the name of a key can make two paths equal
            key = path.replace(self._dotted, self._slashed, 1)
            while key in self.tensors:
                key += "~"
            self._at[address] = (*here, key) if here else (key,)
            self.tensors[key] = tensor
        if not tensor.is_contiguous() and _is_dense(tensor):
            return {"$tensor": key, "stride": list(tensor.stride())}
        return {"$tensor": key}


def _plain(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The tensor without its graph, or an error when its values are not simply numbers in memory.

    DTensors pass: each rank writes its part of them.
    """
    if (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_meta)
        and not (tensor.is_conj() or tensor.is_neg())
    ):
        return tensor  # what follows would come to the same, and takes five times as long
    if is_lazy(tensor):
        raise UnsavableState(
            f"{path} has no values yet, because its lazy layer has seen no batch. Run one through "
            "the model before the first save"
        )
    subclass = type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    odd = (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_meta
        or (subclass and type(tensor).__name__ not in ("DTensor", "Buffer"))
    )
    if odd:
        raise UnsavableState(
            f"{path} is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}, "
            "which cannot be saved. Put a dense tensor into the state_dict"
        )
    return tensor.detach().resolve_conj().resolve_neg()


def _address(tensor: torch.Tensor) -> int:
    """Equal for two tensors that show the same memory; of those without memory of their own, each
    has another one."""
    if type(tensor) is torch.Tensor and tensor.numel():
        return tensor.data_ptr()
    return -id(tensor)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors at one address show the same memory in the same way."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the strides are only another order of the axes, without holes or overlaps."""
    if type(tensor) is not torch.Tensor:
        return False
    wanted = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != wanted:
            return False
        wanted *= size
    return True


def _factory(value: defaultdict[Any, Any], path: str) -> str | None:
    factory = value.default_factory
    if factory is None:
        return None
    for name, known in FACTORIES.items():
        if factory is known:
            return name
    raise UnsavableState(
        f"{path} is a defaultdict that makes its values with {factory!r}; only "
        f"{', '.join(FACTORIES)} can be saved. Put dict({path.rsplit('.', 1)[-1]}) into the "
        "state_dict"
    )


def _unsavable(value: Any, path: str) -> UnsavableState:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    name = f"{module}{kind.__qualname__}"
    if isinstance(value, (np.ndarray, np.generic)):
        name += f" of dtype {value.dtype}"  # object arrays and structured ones
    return UnsavableState(
        f"{path} is a {name}, which could be saved by pickling only; that is never done, because "
        "reading such a file runs what is in it. Put plain values and tensors there (an enum's "
        ".value, a dataclass as a dict), or register an object whose state_dict() "
        "holds such values"
    )


def _decode(value: JsonValue, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Raises whatever a malformed value leads to."""
    if not isinstance(value, dict):
        return [_decode(one, tensors) for one in value] if isinstance(value, list) else value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(one, tensors) for key, one in value.items()}
    body = value[tag]
    if tag == "$tensor":
        return _strided(tensors[body], value.get("stride"))
    if tag in _FROM_JSON:
        return _FROM_JSON[tag](body)
    if tag in _FROM_ITEMS and isinstance(body, list):
        return _FROM_ITEMS[tag]([_decode(one, tensors) for one in body])
    raise CheckpointCorrupt(f"the description of the state has {tag!r}, which no release writes so")


def _strided(tensor: torch.Tensor, stride: list[int] | None) -> torch.Tensor:
    if stride is None or tuple(stride) == tensor.stride():
        return tensor
    if sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True)) != (
        tensor.numel() - 1
    ):
        raise CheckpointCorrupt(f"a tensor of {tensor.numel()} values has strides {stride}")
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(tensor)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointCorrupt(f"torch {torch.__version__} has no dtype {name!r}")
    return found


def _dict(pairs: Any) -> dict[Any, Any]:
    # not dict(pairs): that would make a list of each pair first, also of a range without an end
    return {key: one for key, one in pairs}  # noqa: C416


def _deque(items: Any, maxlen: int | None) -> deque[Any]:
    if not isinstance(items, list):
        raise TypeError(f"a deque of {items!r:.80}")
    return deque(items, maxlen)


def _ordered(pairs: Any, metadata: Any) -> OrderedDict[Any, Any]:
    found: OrderedDict[Any, Any] = OrderedDict(_dict(pairs))
    if metadata is not None:
        found._metadata = metadata  # type: ignore[attr-defined]
    return found


def _ndarray(dtype: Any, shape: Any, raw: torch.Tensor) -> Any:
    kind = np.dtype(str(dtype))
    count, rest = divmod(raw.numel(), kind.itemsize)
    if rest or raw.dtype != torch.uint8 or kind.hasobject:
        raise ValueError(f"{raw.numel()} values of {raw.dtype} are no array of {kind}")
    if raw.is_meta:  # CheckpointFiles.check() only looks
        return np.broadcast_to(np.zeros((), kind), (count,)).reshape(shape)
    return np.frombuffer(raw.numpy().tobytes(), kind).reshape(shape).copy()


def _children(value: JsonValue, like: Any) -> Iterator[tuple[JsonValue, Any]]:
    """What an encoded value holds, each with its ``like``; raises what a malformed one leads to."""
    if isinstance(value, list):
        for place, one in enumerate(value):
            yield one, _at(like, place)
        return
    if not isinstance(value, dict):
        return
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        for key, one in value.items():
            yield one, _at(like, key)
        return
    body = value[tag]
    if tag == "$ordered":
        body, metadata = body
        yield metadata, None
    elif tag == "$defaultdict":
        body = body[1]
    elif tag in ("$tuple", "$deque"):
        yield (body if tag == "$tuple" else body[0]), like
        return
    elif tag not in ("$dict", "$counter"):
        yield body, None
        return
    for key, one in body:
        yield key, None
        yield one, None if like is None else _at(like, decode(key, {}))


def _at(like: Any, key: Any) -> Any:
    if is_dtensor(like):
        return like
    if isinstance(like, Mapping):
        return like.get(key)
    if isinstance(like, (list, tuple)) and isinstance(key, int) and key < len(like):
        return like[key]
    return None


def _corrupt(error: Exception) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"the description of the state cannot be read: {type(error).__name__}: {error}"
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_LEAVES: dict[type, tuple[str, Callable[[Any], JsonValue], Callable[[Any], Any]]] = {
    int: ("$int", hex, lambda body: int(body, 16)),
    float: (
        "$float",
        lambda value: struct.pack(">d", value).hex(),
        lambda body: struct.unpack(">d", bytes.fromhex(body))[0],
    ),
    complex: (
        "$complex",
        lambda value: struct.pack(">dd", value.real, value.imag).hex(),
        lambda body: complex(*struct.unpack(">dd", bytes.fromhex(body))),
    ),
    bytes: ("$bytes", _base64, base64.b64decode),
    bytearray: ("$bytearray", _base64, lambda body: bytearray(base64.b64decode(body))),
    range: (
        "$range",
        lambda value: [value.start, value.stop, value.step],
        lambda body: range(*body),
    ),
    **{
        kind: (tag, str, kind)
        for tag, kind in {
            "$decimal": Decimal,
            "$uuid": uuid.UUID,
            "$path": type(pathlib.Path()),
            "$pure_path": pathlib.PurePosixPath,
        }.items()
    },
    Fraction: (
        "$fraction",
        lambda value: [hex(value.numerator), hex(value.denominator)],
        lambda body: Fraction(*(int(one, 16) for one in body)),
    ),
    datetime.datetime: (
        "$datetime",
        datetime.datetime.isoformat,
        datetime.datetime.fromisoformat,
    ),
    datetime.date: ("$date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: ("$time", datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (
        "$timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda body: datetime.timedelta(*body),
    ),
    array: (
        "$array",
        lambda value: [value.typecode, _base64(value.tobytes())],
        lambda body: array(body[0], base64.b64decode(body[1])),
    ),
    torch.Size: ("$size", list, torch.Size),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch."), _dtype),
    torch.device: ("$device", str, torch.device),
    np.generic: (
        "$numpy",
        lambda value: [value.dtype.str, _base64(value.tobytes())],
        lambda body: np.frombuffer(base64.b64decode(body[1]), np.dtype(body[0]))[0],
    ),
}
"""Type -> its tag, and the way to JSON and back."""
LEAVES = frozenset(_LEAVES) - {np.generic} | {bool, str, type(None)}
"""Types of single values that come back as they are; numpy's as well."""

_FROM_JSON = {tag: from_json for tag, _, from_json in _LEAVES.values()}

_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": _dict,
    "$counter": lambda pairs: Counter(_dict(pairs)),
    "$deque": lambda body: _deque(*body),
    "$ordered": lambda body: _ordered(*body),
    "$defaultdict": lambda body: defaultdict(
        FACTORIES[body[0]] if body[0] else None, _dict(body[1])
    ),
    "$ndarray": lambda body: _ndarray(*body),
}
"""A container's tag -> the way back from what it holds."""
