"""Exports a checkpoint to what other programs can read: torch's .pt, .safetensors, or a folder of
torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import importlib
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from hydroslurm.checkpoint.storage import AnyonesStorage
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore
from hydroslurm.errors import CheckpointError, SaveFailed, UsageError

SUFFIXES = (".pt", ".pth", ".safetensors", ".dcp")
"""Of the target; ``.dcp`` is a folder."""


def export(checkpoint: Checkpoint, target: Path, *, only: Collection[str] | None = None) -> Path:
    """Verify a checkpoint and write its state to one file, or to one folder for DCP, atomically.

    With a single name in ``only`` the file holds that state_dict itself, so that
    ``model.load_state_dict(torch.load(target))`` works; otherwise a dict by name. Everything is on
    the CPU. A ``.pt`` can be read with ``weights_only=True``; a ``.dcp`` has the tensors only.

    Args:
        only: names of what was saved; everything that the ranks share when None.

    Raises:
        UsageError: the suffix is not in SUFFIXES, the format cannot hold these values, or a folder
            is there already.
        CheckpointMissing, CheckpointCorrupt: as CheckpointStore.load.
        SaveFailed: the file cannot be written.
    """
    if target.suffix not in SUFFIXES:
        raise UsageError(f"{target.name} ends in none of {', '.join(SUFFIXES)}")
    if target.suffix == ".dcp" and target.exists():
        raise UsageError(f"{target} is there already; remove it, or give another name")
    write = _WRITERS.get(target.suffix, _write_pt)
    state = CheckpointStore(checkpoint.path.parent, storage=AnyonesStorage()).load(
        checkpoint, only=only
    )
    found: dict[str, Any] = dict(state.shared)
    if only is not None:
        found |= state.own
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        write(next(iter(found.values())) if len(only or ()) == 1 else found, draft)
        fd = os.open(draft, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        draft.replace(target)
    except (OSError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise SaveFailed(f"{target} cannot be written: {error}") from error
    finally:
        _remove(draft)
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


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft)
    else:
        draft.unlink(missing_ok=True)


def _write_dcp(value: Any, path: Path) -> None:
    """Tensors only: DCP pickles other values, and whoever loads them unpickles what the folder's
    writer chose."""
    # imported here: it takes 0.2 s, and the other formats do without
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors, _ = named(value)
    if not tensors:
        raise UsageError("it holds no tensors, and DCP's format is for tensors. Export to a .pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a single process saves
        try:
            save(tensors, checkpoint_id=path)
        except CheckpointException as error:  # a BaseException, around what has happened
            ((reason, _),) = error.failures.values()
            raise reason from error


def _write_safetensors(value: Any, path: Path) -> None:
    try:
        safetensors = importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise UsageError(
            "the package safetensors is not installed: `pip install safetensors`, or choose a .pt"
        ) from error
    tensors, others = named(value)
    if others:
        name, one = next(iter(others.items()))
        raise UsageError(
            f"a .safetensors file holds tensors only, and {name or 'this'} is a "
            f"{type(one).__name__}. Choose with --only, or export to a .pt"
        )
    # safetensors refuses shared memory: tied weights become two tensors
    whole = torch.contiguous_format
    safetensors.save_file(
        {name: one.clone(memory_format=whole) for name, one in tensors.items()}, path
    )


def named(value: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a state by their dotted names, tied ones under each of them, and all else."""
    tensors, others = dict[str, torch.Tensor](), dict[str, Any]()
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        name, one = todo.pop()
        if isinstance(one, torch.Tensor):
            tensors[name] = one.detach()
        elif isinstance(one, (Mapping, list, tuple)):
            items = one.items() if isinstance(one, Mapping) else enumerate(one)
            todo += [(f"{name}.{key}" if name else str(key), part) for key, part in items]
        else:
            others[name] = one
    return dict(reversed(tensors.items())), dict(reversed(others.items()))


_WRITERS: dict[str, Callable[[Any, Path], None]] = {
    ".safetensors": _write_safetensors,
    ".dcp": _write_dcp,
}
