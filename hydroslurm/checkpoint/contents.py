"""What lies in a checkpoint's folder beside the manifest: a state as files, and back.

shared.json       what all ranks have in common, tensors as references
rank-00000.json   what only that rank has
__0_0.distcp      that rank's tensors, in torch's DCP format
.metadata         DCP's index of them

Of several ranks each writes a file of its own and one of tensors (see ``index``, ``portion``).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hydroslurm.checkpoint import reshard
from hydroslurm.checkpoint.checksummed_file import (
    CHUNK_BYTES,
    ChecksummedFile,
    chunks,
    read_whole,
    write_whole,
)
from hydroslurm.checkpoint.manifest import FileEntry
from hydroslurm.checkpoint.reader import read_tensors
from hydroslurm.checkpoint.skeleton import JsonValue, join, split, tensor_keys
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.writer import PartsWriter, write_tensors
from hydroslurm.core.files import check_depth
from hydroslurm.errors import CheckpointCorrupt, CheckpointMissing, UsageError

SHARED_JSON = "shared.json"

_MOST_DEPTH = 1000
"""A state that is nested deeper could not be saved either."""


@dataclass(frozen=True)
class State:
    """What is saved, by name: what all ranks have in common, and what is this rank's own."""

    shared: Mapping[str, Any]
    own: Mapping[str, Any]


@dataclass(frozen=True)
class SplitState:
    """A state without its tensors, and those. The tensors are the caller's, not copies."""

    shared: dict[str, JsonValue]
    own: dict[str, JsonValue]
    tensors: dict[str, torch.Tensor]
    rank: int

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def own_json(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def split_state(state: State, *, rank: int) -> SplitState:
    """Separate values and tensors; writes nothing.

    Raises:
        UnsavableState: names the place of an object that cannot be saved.
        UsageError: a name that is not one.
    """
    for name in (*state.shared, *state.own):
        if not isinstance(name, str) or not name or name.startswith("$"):
            raise UsageError(f"a state's name must be a word that does not begin with $: {name!r}")
    shared, shared_tensors = split(dict(state.shared), prefix="shared")
    own, own_tensors = split(dict(state.own), prefix=f"rank-{rank:05d}")
    assert isinstance(shared, dict)
    assert isinstance(own, dict)
    return SplitState(shared, own, shared_tensors | own_tensors, rank)


def write_contents(
    folder: Path,
    state: SplitState,
    *,
    storage: Storage,
    hasher: ThreadPoolExecutor,
    cancel: threading.Event | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, FileEntry]:
    """Write and fsync all files into an existing folder.

    Raises:
        OSError: a call failed.
        SaveAbandoned: ``cancel`` was set.
    """
    writer = PartsWriter(
        folder,
        storage=storage,
        hasher=hasher,
        rank=state.rank,
        cancel=cancel,
        chunk_bytes=chunk_bytes,
    )
    write_tensors(state.tensors, writer)
    files = dict(writer.files)
    for name, skeleton in ((SHARED_JSON, state.shared), (own_json(state.rank), state.own)):
        text = json.dumps(skeleton, allow_nan=False, separators=(",", ":"))
        files[name] = write_whole(folder / name, text.encode(), storage=storage, hasher=hasher)
    return files


def copy_file(
    source: Path,
    target: Path,
    *,
    storage: Storage,
    hasher: ThreadPoolExecutor,
    cancel: threading.Event | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> FileEntry:
    """Copy one file durably; the entry is of what was read.

    Raises:
        CheckpointCorrupt: the source cannot be read. OSError: the target cannot be written.
    """
    part = ChecksummedFile(
        target, storage=storage, hasher=hasher, cancel=cancel, chunk_bytes=chunk_bytes
    )
    try:
        pieces = chunks(source, storage=storage, chunk_bytes=chunk_bytes)
        while True:
            try:
                piece = next(pieces, None)
            except OSError as error:
                raise CheckpointCorrupt(f"{source} cannot be read: {error.strerror}") from error
            if piece is None:
                return part.finish()
            part.write(piece)
            part.check()
    finally:
        part.abandon()


def read_contents(
    folder: Path,
    files: Collection[str],
    *,
    storage: Storage,
    rank: int,
    only: Collection[str] | None = None,
    like: Mapping[str, Any] | None = None,
) -> State:
    """Read a state, or the parts of it that ``only`` names, laid out as ``like`` says.

    A rank that had no part in the save has nothing of its own.

    Raises:
        CheckpointCorrupt: a file is gone or does not hold what it should.
        CheckpointMissing: there is nothing of a name in ``only``.
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
    keys = tensor_keys(list(shared.values())) | tensor_keys(list(own.values()))
    templates = {
        key: template
        for name, value in shared.items()
        for key, template in reshard.templates(value, (like or {}).get(name)).items()
    }
    tensors = read_tensors(folder, storage=storage, only=keys, like=templates)
    return State(
        shared={name: join(value, tensors) for name, value in shared.items()},
        own={name: join(value, tensors) for name, value in own.items()},
    )


def read_own(
    folder: Path, files: Collection[str], *, storage: Storage, rank: int
) -> dict[str, Any]:
    """What was one rank's own.

    Raises:
        CheckpointMissing: that rank had no part in the save.
        CheckpointCorrupt: a file is gone or does not hold what it should.
    """
    mine = own_json(rank)
    if mine not in files:
        there = sum(name.startswith("rank-") for name in files)
        raise CheckpointMissing(f"{folder} has nothing of rank {rank}: {there} ranks saved it")
    own = _read_json(folder / mine, storage=storage)
    tensors = read_tensors(folder, storage=storage, only=tensor_keys(list(own.values())))
    return {name: join(value, tensors) for name, value in own.items()}


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
