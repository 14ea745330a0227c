"""Exports the tensors of a checkpoint to a folder that torch.distributed.checkpoint (DCP) loads."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from hydroslurm.errors import UsageError

METADATA = ".metadata"
"""DCP's own name for its index."""

TENSORS = "__0_0.distcp"


def write_dcp(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write tensors by their names, and DCP's index of them, into a new folder. No other values:
    DCP pickles those, and whoever loads them unpickles what the folder's writer chose.

    Raises:
        UsageError: there are no tensors. OSError: the folder cannot be written.
    """
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
