"""What the tags of a skeleton stand for, on the way back. Pure.

A fixed table: a name in a file chooses among the types below, and never what is imported or called.
"""

from __future__ import annotations

import base64
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from hydroslurm.errors import CheckpointCorrupt

JsonValue: TypeAlias = "bool | int | float | str | list[Any] | dict[str, Any] | None"

FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)
}
"""What a defaultdict may make its values with."""


def decode(value: JsonValue, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that was encoded; raises whatever a malformed one leads to."""
    if isinstance(value, list):
        return [decode(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(one, tensors) for key, one in value.items()}
    if tag == "$tensor":
        return _shaped(tensors[value[tag]], value.get("stride"))
    if tag in _VALUES:
        return _VALUES[tag](value[tag])
    if tag == "$ndarray":
        kind, shape, raw = value[tag]
        data = decode(raw, tensors).numpy().tobytes()
        return np.frombuffer(data, np.dtype(kind)).reshape(shape).copy()
    return _container(tag, value[tag], tensors)


def _container(tag: str, body: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if tag in _ITEMS:
        return _ITEMS[tag](decode(body, tensors))
    if tag == "$deque":
        return deque(decode(body[0], tensors), body[1])
    if tag in ("$dict", "$counter"):
        pairs = dict(decode(body, tensors))
        return Counter(pairs) if tag == "$counter" else pairs
    if tag == "$defaultdict":
        return defaultdict(FACTORIES[body[0]] if body[0] else None, decode(body[1], tensors))
    if tag == "$ordered":
        ordered: OrderedDict[Any, Any] = OrderedDict(decode(body[0], tensors))
        if body[1] is not None:
            ordered._metadata = decode(body[1], tensors)  # type: ignore[attr-defined]
        return ordered
    raise CheckpointCorrupt(f"the description of the state has a tag {tag!r} that does not exist")


def _shaped(tensor: torch.Tensor, stride: list[int] | None) -> torch.Tensor:
    if stride is None or tuple(stride) == tensor.stride():
        return tensor
    if sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True)) != (
        tensor.numel() - 1
    ):
        raise CheckpointCorrupt(f"a tensor of {tensor.numel()} values has strides {stride}")
    shaped = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype)
    return shaped.copy_(tensor)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointCorrupt(f"torch {torch.__version__} has no dtype {name!r}")
    return found


_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
}

_VALUES: dict[str, Callable[[Any], Any]] = {
    "$int": lambda body: int(body, 16),
    "$float": lambda body: struct.unpack(">d", bytes.fromhex(body))[0],
    "$bytes": base64.b64decode,
    "$bytearray": lambda body: bytearray(base64.b64decode(body)),
    "$complex": lambda body: complex(*struct.unpack(">dd", bytes.fromhex(body))),
    "$range": lambda body: range(*body),
    "$size": torch.Size,
    "$dtype": _dtype,
    "$device": torch.device,
    "$numpy": lambda body: np.frombuffer(base64.b64decode(body[1]), np.dtype(body[0]))[0],
}
