"""A tree of state <-> JSON with references to tensors. Pure.

What JSON cannot say is an object with one key that begins with ``$``::

    {"$tensor": "shared/model/fc.weight"}          the tensor of that key, which is stored elsewhere
    {"$tuple": [...]}  {"$set": [...]}             containers that are not lists
    {"$dict": [[key, value], ...]}                 keys that are no strings, or begin with "$"
    {"$int": "0x..."}  {"$float": "7ff0..."}       what a JSON reader elsewhere would round

Reading it back builds values of the types below and of no others: nothing is imported, called by
name or unpickled, which is why checkpoints can be read from anyone.
"""

from __future__ import annotations

import base64
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hydroslurm.checkpoint.tags import FACTORIES, JsonValue, decode
from hydroslurm.errors import CheckpointCorrupt, UnsavableState

__all__ = ["JsonValue", "is_dtensor", "join", "split", "tensor_keys"]

EXACT_INT_BITS = 63


def split(tree: Any, *, prefix: str) -> tuple[JsonValue, dict[str, torch.Tensor]]:
    """Take the tensors out of a tree.

    Containers and scalars of Python, numpy and torch come back as exactly the types they were:
    OrderedDict (with the ``_metadata`` that modules put on their state_dict), Counter and
    defaultdict too. A tensor comes back on the CPU, as a plain Tensor (Parameters included), with
    its strides when it is dense; tensors that view the same memory in the same way are stored once.

    Args:
        tree: state_dicts, nested as they like.
        prefix: begins the key of every tensor, as in ``shared/model/fc.weight``.

    Returns:
        What :func:`join` takes. The tensors are the caller's own, not copies.

    Raises:
        UnsavableState: naming the place and the type of the first object that is none of these.
    """
    splitter = _Splitter(prefix)
    try:
        skeleton = splitter.encode(tree, prefix)
    except RecursionError:
        raise UnsavableState(
            f"{prefix} is nested too deeply to be saved. Keep the state flat: "
            "a state_dict of plain values and tensors"
        ) from None
    return skeleton, splitter.tensors


def join(skeleton: JsonValue, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put a tree together again.

    Raises:
        CheckpointCorrupt: a tag that no version wrote, or a tensor that is not there.
    """
    try:
        return decode(skeleton, tensors)
    except CheckpointCorrupt:
        raise
    except Exception as error:
        raise CheckpointCorrupt(
            f"the description of the state cannot be read: {type(error).__name__}: {error}"
        ) from error


def tensor_keys(skeleton: JsonValue) -> set[str]:
    """The keys of all tensors that a skeleton, or a part of one, refers to."""
    found: set[str] = set()
    todo = [skeleton]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict) and "$tensor" in value:
            found.add(str(value["$tensor"]))
        elif isinstance(value, dict):
            todo += value.values()
    return found


def is_dtensor(value: Any) -> bool:
    """Whether it is torch's distributed tensor, which is not imported for the question."""
    return type(value).__name__ == "DTensor" and isinstance(value, torch.Tensor)


class _Splitter:
    """One walk over a tree. ``path`` is how a person would write the place in Python."""

    def __init__(self, prefix: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._prefix = prefix
        self._keys: dict[tuple[object, ...], str] = {}
        self._open: set[int] = set()

    def encode(self, value: Any, path: str) -> JsonValue:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value  # type: ignore[no-any-return]
        if kind is int:
            return value if value.bit_length() <= EXACT_INT_BITS else {"$int": hex(value)}
        if kind is float:
            finite = value - value == 0.0
            return value if finite else {"$float": struct.pack(">d", value).hex()}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        encode = _SCALARS.get(kind)
        if encode is not None:
            return encode(value)
        if isinstance(value, np.generic) and value.dtype.kind in "biufcSUmM":
            return {"$numpy": [value.dtype.str, _base64(value.tobytes())]}
        return self._guarded(value, path)

    def _guarded(self, value: Any, path: str) -> JsonValue:
        if id(value) in self._open:
            raise UnsavableState(f"{path} contains itself; a checkpoint holds trees only")
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
            return self._dict(value, path)
        if kind in (tuple, set, frozenset):
            return {f"${kind.__name__}": self._items(value, path)}
        if kind is deque:
            return {"$deque": [self._items(value, path), value.maxlen]}
        if kind is OrderedDict:
            pairs = self._pairs(value, path)
            marks = getattr(value, "_metadata", None)
            return {"$ordered": [pairs, self.encode(marks, f"{path}._metadata")]}
        if kind is Counter:
            return {"$counter": self._pairs(value, path)}
        if kind is defaultdict:
            return {"$defaultdict": [_factory(value, path), self._pairs(value, path)]}
        if kind is np.ndarray and value.dtype.kind in "biufcSUmM":
            raw = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
            return {"$ndarray": [value.dtype.str, list(value.shape), self._tensor(raw, path)]}
        raise _unsavable(value, path)

    def _items(self, values: Iterable[Any], path: str) -> list[JsonValue]:
        return [self.encode(one, f"{path}[{place}]") for place, one in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: str) -> JsonValue:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(one, _below(path, key)) for key, one in value.items()}
        return {"$dict": self._pairs(value, path)}

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[JsonValue]:
        return [
            [self.encode(key, f"{path}, key {key!r}"), self.encode(one, _below(path, key))]
            for key, one in value.items()
        ]

    def _tensor(self, tensor: torch.Tensor, path: str) -> JsonValue:
        tensor = _plain(tensor, path)
        view = (tensor.device, tensor.dtype, tuple(tensor.shape), *_memory(tensor))
        key = self._keys.get(view)
        if key is None:
            # a "." and a "[" in the name of a key can make two paths equal
            key = path.replace(self._prefix + ".", self._prefix + "/", 1)
            while key in self.tensors:
                key += "~"
            self._keys[view] = key
            self.tensors[key] = tensor
        if _is_dense(tensor) and not tensor.is_contiguous():
            return {"$tensor": key, "stride": list(tensor.stride())}
        return {"$tensor": key}


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if type(key) is str else f"{path}[{key!r}]"


def _plain(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The tensor without its graph, or an error when its values are not simply numbers in memory.

    DTensors pass: DCP writes each rank's part of them.
    """
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


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """What is equal for two tensors of one shape if and only if they show the same memory."""
    if type(tensor) is torch.Tensor and tensor.numel():
        return tensor.data_ptr(), tensor.stride()
    return (id(tensor),)


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
    name = kind.__qualname__ if kind.__module__ == "builtins" else _full_name(kind)
    if isinstance(value, (np.ndarray, np.generic)):
        name += f" of dtype {value.dtype}"  # object arrays and structured ones
    return UnsavableState(
        f"{path} is a {name}, which could be saved by pickling only; that is never done, because "
        "reading such a file runs what is in it. Put plain values and tensors there (an enum's "
        ".value, a Path as str, a dataclass as a dict), or register an object whose state_dict() "
        "holds such values"
    )


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_SCALARS: dict[type, Callable[[Any], JsonValue]] = {
    bytes: lambda value: {"$bytes": _base64(value)},
    bytearray: lambda value: {"$bytearray": _base64(value)},
    complex: lambda value: {"$complex": struct.pack(">dd", value.real, value.imag).hex()},
    range: lambda value: {"$range": [value.start, value.stop, value.step]},
    torch.Size: lambda value: {"$size": list(value)},
    torch.dtype: lambda value: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"$device": str(value)},
}
