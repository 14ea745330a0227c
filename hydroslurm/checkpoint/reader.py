"""The files of a checkpoint -> a state, its tensors on the CPU; no pickle is trusted.

DCP keeps its index in a pickle. An unpickler reads it that knows the dozen classes of which such an
index consists and refuses every other name. ``torch.load`` reads the tensors with
``weights_only=True``. DCP's third kind of content, pickled objects, is refused.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

from hydroslurm.checkpoint.checksummed_file import read_whole
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.tree import JsonValue, decode, tensor_keys
from hydroslurm.checkpoint.write_plan import State
from hydroslurm.checkpoint.writer import METADATA, SHARED_JSON, own_json
from hydroslurm.core.files import check_depth
from hydroslurm.errors import CheckpointCorrupt, CheckpointMissing

_FILE = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp")

_MOST_DEPTH = 1000
"""A state that is nested more deeply cannot be saved either."""

_CLASSES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp.TensorStorageMetadata,
        dcp.TensorProperties,
        dcp.ChunkStorageMetadata,
        dcp._MEM_FORMAT_ENCODING,
        _StorageInfo,
        torch.Size,
    )
}


def read_state(
    folder: Path,
    files: Collection[str],
    *,
    storage: Storage,
    rank: int,
    only: Collection[str] | None = None,
    like: Mapping[str, Any] | None = None,
) -> State:
    """Read a state, or the names in ``only``, laid out as ``like`` says.

    A rank that had no part in the save has nothing of its own.

    Raises:
        CheckpointCorrupt: a file is missing or does not hold what it should.
        CheckpointMissing: a name in ``only`` was not saved.
    """
    shared = _read_json(folder / SHARED_JSON, storage=storage)
    mine = own_json(rank)
    own = _read_json(folder / mine, storage=storage) if mine in files else {}
    if only is not None:
        missing = sorted(set(only) - set(shared) - set(own))
        if missing:
            raise CheckpointMissing(
                f"{folder} has no {', '.join(missing)}; it has {', '.join([*shared, *own])}"
            )
        shared = {name: value for name, value in shared.items() if name in only}
        own = {name: value for name, value in own.items() if name in only}
    layouts: dict[str, torch.Tensor | None] = {}
    for name, value in shared.items():
        layouts |= tensor_keys(value, (like or {}).get(name))
    for value in own.values():
        layouts |= tensor_keys(value)
    tensors = read_tensors(folder, storage=storage, only=layouts, like=layouts)
    return State(
        shared={name: decode(value, tensors) for name, value in shared.items()},
        own={name: decode(value, tensors) for name, value in own.items()},
    )


def read_own(
    folder: Path, files: Collection[str], *, storage: Storage, rank: int
) -> dict[str, Any]:
    """The ``own`` of one rank.

    Raises:
        CheckpointMissing: that rank had no part in the save.
        CheckpointCorrupt: a file is missing or does not hold what it should.
    """
    mine = own_json(rank)
    if mine not in files:
        there = sum(name.startswith("rank-") for name in files)
        raise CheckpointMissing(f"{folder} has nothing of rank {rank}: {there} ranks saved it")
    own = _read_json(folder / mine, storage=storage)
    tensors = read_tensors(folder, storage=storage, only=tensor_keys(list(own.values())))
    return {name: decode(value, tensors) for name, value in own.items()}


def _read_json(path: Path, *, storage: Storage) -> dict[str, JsonValue]:
    try:
        text = read_whole(path, storage=storage).decode()
        check_depth(text, max_depth=_MOST_DEPTH)
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointCorrupt(f"{path} holds no names, but a {type(found).__name__}")
    return found


def read_metadata(folder: Path, *, storage: Storage) -> dcp.Metadata:
    """DCP's index of a checkpoint.

    Raises:
        CheckpointCorrupt: it is missing, is not an index, or names anything but its classes.
    """
    path = folder / METADATA
    try:
        found = _Unpickler(io.BytesIO(read_whole(path, storage=storage))).load()
    except Exception as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dcp.Metadata):
        raise CheckpointCorrupt(f"{path} is not an index of DCP, but a {type(found).__name__}")
    return found


def read_tensors(
    folder: Path,
    *,
    storage: Storage,
    only: Collection[str] | None = None,
    like: Mapping[str, torch.Tensor | None] | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint folder, whole and on the CPU.

    Args:
        only: their keys; all of them when None.
        like: key -> a DTensor of this process, or None. A tensor of the same shape is laid out like
            it, and only the pieces that this takes are read.

    Raises:
        CheckpointCorrupt: a key is missing, or a file does not hold what it should.
    """
    metadata = read_metadata(folder, storage=storage)
    keys = metadata.state_dict_metadata if only is None else only
    try:
        _require_room(metadata, keys, _stored_bytes(metadata, folder, storage=storage))
        tensors = {
            key: _empty(metadata.state_dict_metadata[key], (like or {}).get(key)) for key in keys
        }
        _fill(tensors, folder, metadata)
    except KeyError as error:
        raise CheckpointCorrupt(f"{folder} has no tensor {error}") from error
    except Exception as error:
        raise CheckpointCorrupt(f"the tensors of {folder} cannot be read: {error}") from error
    return tensors


def _stored_bytes(metadata: dcp.Metadata, folder: Path, *, storage: Storage) -> dict[object, int]:
    """Key -> bytes of its pieces, which together fit into their files.

    Raises:
        ValueError: a piece is not in a file of this folder.
        OSError: such a file cannot be read.
    """
    left: dict[str, int] = {}
    found: dict[object, int] = {}
    for index, info in (metadata.storage_data or {}).items():
        name, begin, length = info.relative_path, info.offset, info.length
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise ValueError(f"a piece of a tensor lies in {str(name)[:80]!r}")
        if getattr(info, "transform_descriptors", None):
            raise ValueError("a piece of a tensor is stored in a form that DCP alone can read")
        if name not in left:
            left[name] = _size_bytes(folder / name, storage)
        if type(begin) is not int or type(length) is not int or min(begin, length) < 0:
            raise ValueError(f"a piece of a tensor lies at {begin!r}, {length!r} bytes")
        left[name] -= length
        if left[name] < 0:
            raise ValueError(f"{name} is shorter than the pieces of tensors in it")
        found[index.fqn] = found.get(index.fqn, 0) + length
    return found


def _size_bytes(path: Path, storage: Storage) -> int:
    fd = storage.open(path)
    try:
        return storage.size(fd)
    finally:
        storage.close(fd)


def _require_room(
    metadata: dcp.Metadata, keys: Collection[str], stored: Mapping[object, int]
) -> None:
    """Check that no tensor is larger than what is stored of it: a shape alone is not trusted.

    Raises:
        KeyError: a tensor is missing.
        TypeError, ValueError: one is not a tensor, or is larger.
    """
    for key in keys:
        found = metadata.state_dict_metadata[key]
        if not isinstance(found, dcp.TensorStorageMetadata):
            raise TypeError(f"{type(found).__name__} in the place of a tensor")
        shape, dtype = tuple(found.size), found.properties.dtype
        if any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"{key} has shape {shape}")
        if math.prod(shape) * dtype.itemsize > stored.get(key, 0):
            raise ValueError(
                f"{key} has shape {shape} of {dtype}, and {stored.get(key, 0)} bytes are stored"
            )


def _empty(found: dcp.STORAGE_TYPES, template: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(found, dcp.TensorStorageMetadata)
    if template is not None and tuple(template.shape) == tuple(found.size):
        return torch.empty_like(template.detach(), dtype=found.properties.dtype)
    return torch.empty(found.size, dtype=found.properties.dtype)


def _fill(tensors: dict[str, torch.Tensor], folder: Path, metadata: dcp.Metadata) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plans = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plans[0]), planner).wait()


class _Unpickler(pickle.Unpickler):
    """Knows DCP's classes and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        known = _CLASSES.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of DCP needs")


def _memory_format(kind: Any, name: str) -> Any:
    """Stands in for ``getattr``, by which Python 3.11.0 to 3.11.3 pickle the members of an enum;
    other releases call the class with the value."""
    if kind is dcp._MEM_FORMAT_ENCODING and name in dcp._MEM_FORMAT_ENCODING.__members__:
        return dcp._MEM_FORMAT_ENCODING[name]
    raise pickle.UnpicklingError(f"it asks for {kind!r}.{name}, which no index of DCP needs")


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"layout {name!r}")
    return torch.strided
