"""Exports a checkpoint to one file that other programs can read: torch's .pt, or .safetensors."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from hydroslurm.checkpoint.storage import AnyonesStorage
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore
from hydroslurm.errors import CheckpointError, SaveFailed, UsageError

SUFFIXES = (".pt", ".pth", ".safetensors")


def export(checkpoint: Checkpoint, target: Path, *, only: Collection[str] | None = None) -> Path:
    """Verify a checkpoint and write its state to one file, atomically.

    With a single name in ``only`` the file holds that state_dict itself, so that
    ``model.load_state_dict(torch.load(target))`` works; otherwise a dict by name. Everything is on
    the CPU. A ``.pt`` can be read with ``weights_only=True``.

    Args:
        only: names of what was saved; everything that the ranks share when None.

    Raises:
        UsageError: the suffix is not in SUFFIXES, or the format cannot hold these values.
        CheckpointMissing, CheckpointCorrupt: as CheckpointStore.load.
        SaveFailed: the file cannot be written.
    """
    if target.suffix not in SUFFIXES:
        raise UsageError(f"{target.name} ends in none of {', '.join(SUFFIXES)}")
    write = _write_safetensors if target.suffix == ".safetensors" else _write_pt
    state = CheckpointStore(checkpoint.path.parent, storage=AnyonesStorage()).load(
        checkpoint, only=only
    )
    found: dict[str, Any] = dict(state.shared)
    if only is not None:
        found |= state.own
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        write(next(iter(found.values())) if len(only or ()) == 1 else found, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    except (OSError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise SaveFailed(f"{target} cannot be written: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
    return target


def _write_pt(value: Any, path: Path) -> None:
    torch.save(value, path)
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise UsageError(
            "it holds values that torch.load(weights_only=True) refuses, so that others could read "
            f"it by unpickling only. Choose with --only. torch: {str(error).splitlines()[0]}"
        ) from error


def _write_safetensors(value: Any, path: Path) -> None:
    try:
        safetensors = importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise UsageError(
            "the package safetensors is not installed: `pip install safetensors`, or choose a .pt"
        ) from error
    tensors: dict[str, torch.Tensor] = {}
    _flatten(value, "", tensors)
    safetensors.save_file(tensors, path)


def _flatten(value: Any, name: str, into: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        # safetensors refuses shared memory: tied weights become two tensors
        into[name] = value.clone(memory_format=torch.contiguous_format)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _flatten(one, f"{name}.{key}" if name else str(key), into)
    else:
        raise UsageError(
            f"a .safetensors file holds tensors only, and {name or 'this'} is a "
            f"{type(value).__name__}. Choose with --only, or export to a .pt"
        )
