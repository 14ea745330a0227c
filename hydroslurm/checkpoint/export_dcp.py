"""Exports the tensors of a checkpoint to a folder that torch.distributed.checkpoint (DCP) loads."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from hydroslurm.errors import UsageError

METADATA = ".metadata"
"""DCP's own name for its index."""

TENSORS = "__0_0.distcp"


def write_dcp(value: Any, folder: Path) -> None:
    """Write all tensors of a state, each under its dotted name, and DCP's index of them, into a new
    folder. Values that are no tensors are left out: DCP pickles those, and whoever loads them
    unpickles what the folder's writer chose.

    Raises:
        UsageError: there are no tensors. OSError: the folder cannot be written.
    """
    tensors = _named(value)
    if not tensors:
        raise UsageError("it holds no tensors, and DCP's format is for tensors. Export to a .pt")
    folder.mkdir()
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    said: dict[str, dcp.STORAGE_TYPES] = {}
    with (folder / TENSORS).open("xb") as file:
        for key, tensor in tensors.items():
            begin = file.tell()
            torch.save(tensor.contiguous().clone(), file)
            offsets = torch.Size([0] * tensor.dim())
            said[key] = dcp.TensorStorageMetadata(
                properties=dcp.TensorProperties(dtype=tensor.dtype),
                size=tensor.size(),
                chunks=[dcp.ChunkStorageMetadata(offsets, tensor.size())],
            )
            at = dcp.MetadataIndex(key, offsets, 0)
            places[at] = _StorageInfo(TENSORS, begin, file.tell() - begin)
        file.flush()
        os.fsync(file.fileno())
    metadata = dcp.Metadata(said, storage_data=places)
    if version := getattr(filesystem, "CURRENT_DCP_VERSION", ""):  # torch 2.4's metadata has none
        metadata.version = version
    with (folder / METADATA).open("xb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())


def _named(value: Any) -> dict[str, torch.Tensor]:
    """Name -> tensor, tied ones under each of their names."""
    found: dict[str, torch.Tensor] = {}
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        name, one = todo.pop()
        if isinstance(one, torch.Tensor):
            found[name] = one.detach()
        elif isinstance(one, Mapping):
            todo += [(f"{name}.{key}" if name else str(key), part) for key, part in one.items()]
        elif isinstance(one, (list, tuple)):
            todo += [
                (f"{name}.{place}" if name else str(place), part) for place, part in enumerate(one)
            ]
    return dict(reversed(found.items()))
