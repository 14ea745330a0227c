"""The commit of a joint save, by whichever rank is left to do it.

All ranks have acknowledged that their parts are on the disk. What is still to be written follows
from these parts and from what was agreed, byte for byte, so that any rank can do it, again after
one that died half-way, and even beside one that is only thought to be dead: every file comes into
its place by a rename, and who comes second puts the same bytes there, or finds the folder moved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hydroslurm.checkpoint import commit, manifest
from hydroslurm.checkpoint.catalog import Checkpoint, read_manifest
from hydroslurm.checkpoint.checksummed_file import compare, hashing, read_whole, write_whole
from hydroslurm.checkpoint.index import PartIndex, metadata_of, part_json, pickled
from hydroslurm.checkpoint.manifest import FileEntry, Manifest
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.writer import METADATA
from hydroslurm.errors import CheckpointError

DRAFT = ".tmp"
"""Ends the names of files that are not in their place yet."""


@dataclass(frozen=True)
class Acknowledged:
    """A joint save of which every rank's part is on the disk.

    Attributes:
        folder: its temporary folder. target: its final name.
        header: the manifest as it was agreed at the beginning, without files.
        indexes: rank -> the entry of its part's index.
        save_s: how long the slowest rank took.
    """

    folder: Path
    target: Path
    header: Manifest
    indexes: Mapping[int, FileEntry]
    save_s: float


def finish(
    save: Acknowledged,
    *,
    rank: int,
    is_good: Callable[[Checkpoint], bool],
    may_commit: Callable[[], None],
    storage: Storage,
) -> Manifest:
    """Commit, unless that has been done already; the manifest of what is there then.

    Args:
        may_commit: called before each try, which it can prevent by raising.

    Raises:
        OSError: a call failed. CheckpointCorrupt: a part is not what its rank has acknowledged.
    """
    there = _committed(save, is_good=is_good, storage=storage)
    for attempt in range(commit.ATTEMPTS):
        if there is not None:
            break
        may_commit()
        try:
            there = _move(save, rank=rank, is_good=is_good, storage=storage)
        except FileNotFoundError:  # somebody else has moved the folder, or took our draft away
            there = _committed(save, is_good=is_good, storage=storage)
            if there is None and attempt == commit.ATTEMPTS - 1:
                raise
    assert there is not None
    # who renamed it may have been killed before its last call
    storage.fsync_dir(save.target.parent)
    return there


def _move(
    save: Acknowledged, *, rank: int, is_good: Callable[[Checkpoint], bool], storage: Storage
) -> Manifest:
    described = _describe(save, rank=rank, storage=storage)
    ours = commit.move_into_place(
        save.folder,
        save.target,
        is_whole=lambda: _committed(save, is_good=is_good, storage=storage) is not None,
        storage=storage,
    )
    if ours:
        return described
    with contextlib.suppress(OSError):
        commit.remove_tree(save.folder, storage=storage)
    return read_manifest(save.target, storage=storage)


def _committed(
    save: Acknowledged, *, is_good: Callable[[Checkpoint], bool], storage: Storage
) -> Manifest | None:
    """The manifest under the final name: of this very save, or of a good checkpoint."""
    try:
        found = read_manifest(save.target, storage=storage)
    except CheckpointError:
        return None
    ours = found.created_epoch_ns == save.header.created_epoch_ns
    return found if ours or is_good(Checkpoint(save.target, found)) else None


def _describe(save: Acknowledged, *, rank: int, storage: Storage) -> Manifest:
    """Write DCP's index and the manifest into the folder, from what the parts say."""
    _remove_drafts(save.folder, storage=storage)
    indexes = [_read_index(save, one, storage=storage) for one in sorted(save.indexes)]
    files = {name: entry for index in indexes for name, entry in index.files.items()}
    files |= {part_json(one): entry for one, entry in save.indexes.items()}
    with hashing() as hasher:

        def put(name: str, data: bytes) -> FileEntry:
            draft = save.folder / f"{name}.{rank}{DRAFT}"
            entry = write_whole(draft, data, storage=storage, hasher=hasher)
            storage.rename(draft, save.folder / name)
            storage.fsync_dir(save.folder)
            return entry

        files[METADATA] = put(METADATA, pickled(metadata_of(indexes)))
        described = replace(
            save.header,
            files=files,
            save_s=save.save_s,
            state_bytes=sum(chunk.value_bytes for index in indexes for chunk in index.chunks),
        )
        put(manifest.NAME, described.to_json().encode())
    return described


def _read_index(save: Acknowledged, rank: int, *, storage: Storage) -> PartIndex:
    path = save.folder / part_json(rank)
    text = read_whole(path, storage=storage)
    compare(path, save.indexes[rank], FileEntry(len(text), manifest.checksum(text)))
    return PartIndex.from_json(text, where=path)


def _remove_drafts(folder: Path, *, storage: Storage) -> None:
    """Of an earlier attempt of this rank, and of ranks that died. One that is alive after all comes
    back to look whether its work is done."""
    for name in storage.listdir(folder):
        if name.endswith(DRAFT):
            with contextlib.suppress(FileNotFoundError):
                storage.unlink(folder / name)
