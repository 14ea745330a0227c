"""How a checkpoint comes into being and goes: the order of the calls is the whole point.

    parts, each fsynced -> manifest: written, fsynced, renamed, folder fsynced
    -> folder renamed to its final name -> parent fsynced

Wherever a save is killed, there is either a complete folder under its final name or a leftover that
nobody reads. Nothing is ever removed under its final name: it is renamed first.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path

from hydroslurm.checkpoint import folders
from hydroslurm.checkpoint.checksummed_file import write_whole
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.core.threads import thread

DRAFT = ".tmp"
"""Ends the names of files that are not in their place yet."""

FEW_FILES = 64
UNLINKERS = 16
"""Files of a removed folder for each additional thread, and the most such threads."""


def put(folder: Path, name: str, data: bytes, *, rank: int, storage: Storage) -> None:
    """Write one small file durably, and give it its name when it is complete."""
    draft = folder / f"{name}.{rank}{DRAFT}"
    write_whole(draft, [data], storage=storage)
    storage.rename(draft, folder / name)
    storage.fsync_dir(folder)


def remove_drafts(folder: Path, *, storage: Storage) -> None:
    """Remove drafts of an earlier try of this rank, and of ranks that died. A rank that is alive
    after all finds its draft gone, and looks whether its work is done."""
    for name in storage.listdir(folder):
        if name.endswith(DRAFT):
            with contextlib.suppress(FileNotFoundError):
                storage.unlink(folder / name)


def remove(path: Path, *, storage: Storage) -> None:
    """Remove a committed checkpoint; after a kill half-way it is a leftover.

    Raises:
        OSError: a call failed; the checkpoint is whole or a leftover.
    """
    condemned = folders.condemned(path)
    storage.rename(path, condemned)
    # else a power cut could keep the old name and lose the files
    storage.fsync_dir(path.parent)
    remove_tree(condemned, storage=storage)


def remove_tree(path: Path, *, storage: Storage) -> None:
    """Remove a folder of files; others may be removing it too.

    Raises:
        OSError: a call failed, or there is a folder inside.
    """
    names, failures = deque[str](), list[OSError]()

    def unlink_rest() -> None:
        try:
            while names:
                with contextlib.suppress(FileNotFoundError, IndexError):  # another was quicker
                    storage.unlink(path / names.popleft())
        except OSError as error:
            failures.append(error)
            names.clear()

    with contextlib.suppress(FileNotFoundError):
        names.extend(storage.listdir(path))
        # each waits for the file server, one after the other for minutes
        helpers = [
            thread(unlink_rest, name="hydroslurm-unlink")
            for _ in range(min(UNLINKERS, len(names) // FEW_FILES))
        ]
        for one in helpers:
            one.start()
        unlink_rest()
        for one in helpers:
            one.join()
        if failures:
            raise failures[0]
        storage.rmdir(path)


def remove_leftovers(directory: Path, *, storage: Storage) -> None:
    """Remove what dead saves and removals left; raises OSError."""
    now_epoch_s = time.time()
    for name in storage.listdir(directory):
        path = directory / name
        with contextlib.suppress(FileNotFoundError):
            if folders.is_leftover(path, now_epoch_s=now_epoch_s):
                remove_tree(path, storage=storage)


def revoke(directory: Path, *, storage: Storage) -> None:
    """Take the folders of unfinished saves away from all other processes, for good.

    A new attempt does this once its claim is in place. An older one that checked the claim earlier,
    and was stopped between the check and its last rename, finds nothing to rename when it wakes up:
    what it committed before this call stays, and it commits nothing afterwards.
    """
    try:
        names = storage.listdir(directory)
    except FileNotFoundError:
        return
    for name in names:
        taken = folders.revoked(directory / name)
        if taken is not None:
            with contextlib.suppress(FileNotFoundError):  # its owner was quicker
                storage.rename(directory / name, taken)
                with contextlib.suppress(OSError):  # retention tries again
                    remove_tree(taken, storage=storage)


def make_dirs(path: Path, *, storage: Storage) -> None:
    """Make a folder and its parents, durably: if the name of a folder is never fsynced, a crash can
    lose it together with the checkpoints committed in it."""
    try:
        storage.mkdir(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_dirs(path.parent, storage=storage)
        with contextlib.suppress(FileExistsError):
            storage.mkdir(path)
    storage.fsync_dir(path.parent)
