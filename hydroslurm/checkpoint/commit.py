"""How a checkpoint comes to exist, and how it goes: the order of the calls is the whole point.

    parts, each fsynced -> folder fsynced -> manifest: written, fsynced, renamed -> folder fsynced
    -> folder renamed to its final name -> parent fsynced

Killed anywhere, there is either the folder under its final name, complete, or a leftover that
nobody reads. Nothing is ever removed under its final name: it gets another one first.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hydroslurm.checkpoint import folders, manifest
from hydroslurm.checkpoint.checksummed_file import hashing, write_whole
from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.checkpoint.storage import Storage

TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
"""What rename says when a folder with files in it has the name."""

ATTEMPTS = 3
"""To take the place of a broken checkpoint, while other processes try the same."""


def commit(
    target: Path,
    *,
    temporary: Path,
    fill: Callable[[Path, ThreadPoolExecutor], Manifest],
    is_whole: Callable[[], bool],
    may_commit: Callable[[], None],
    storage: Storage,
) -> Manifest | None:
    """Make a checkpoint at ``target``.

    Args:
        fill: writes and fsyncs the parts into the folder it is given, computing their checksums in
            the thread it is given, and describes them.
        is_whole: whether a good checkpoint is at ``target`` by now; asked when the name is taken.
        may_commit: called before the last rename, which it can prevent by raising.

    Returns:
        Its manifest; None when another process committed the same step before.

    Raises:
        OSError: a call failed. What was committed before is as it was, except that after a failure
            of the very last call the new one may be there too.
    """
    make_dirs(target.parent, storage=storage)
    storage.mkdir(temporary)
    try:
        with hashing() as hasher:
            described = fill(temporary, hasher)
            storage.fsync_dir(temporary)
            draft = temporary / f"{manifest.NAME}.tmp"
            write_whole(draft, described.to_json().encode(), storage=storage, hasher=hasher)
        storage.rename(draft, temporary / manifest.NAME)
        storage.fsync_dir(temporary)
        may_commit()
        ours = move_into_place(temporary, target, is_whole=is_whole, storage=storage)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(temporary, storage=storage)
        raise
    if not ours:
        with contextlib.suppress(OSError):
            remove_tree(temporary, storage=storage)
    storage.fsync_dir(target.parent)
    return described if ours else None


def remove(path: Path, *, storage: Storage) -> None:
    """Remove a committed checkpoint; killed half-way, it is not one any more.

    Raises:
        OSError: a call failed; the checkpoint is whole, or a leftover.
    """
    condemned = folders.condemned(path)
    storage.rename(path, condemned)
    # else a power cut could keep the old name and lose the files
    storage.fsync_dir(path.parent)
    remove_tree(condemned, storage=storage)


def remove_tree(path: Path, *, storage: Storage) -> None:
    """Remove a folder of files; what somebody else removed meanwhile is well."""
    with contextlib.suppress(FileNotFoundError):
        for name in storage.listdir(path):
            with contextlib.suppress(FileNotFoundError):
                storage.unlink(path / name)
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
    """Take the folders of unfinished saves from all other processes, for good.

    Done by a new attempt once its claim is in place. An older one that looked at the claim before,
    and was stopped between the look and its last rename, finds nothing to rename when it wakes up:
    what was committed before this call is there, and nothing is committed after it.
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
    """Make a folder and those above it, durably: a committed checkpoint in a folder whose own name
    was never fsynced would be gone with it."""
    try:
        storage.mkdir(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_dirs(path.parent, storage=storage)
        with contextlib.suppress(FileExistsError):
            storage.mkdir(path)
    storage.fsync_dir(path.parent)


def move_into_place(
    temporary: Path, target: Path, *, is_whole: Callable[[], bool], storage: Storage
) -> bool:
    """Give a finished folder its final name; False when a good checkpoint has it already.

    Raises:
        OSError: a call failed; FileNotFoundError when somebody else has moved ``temporary``.
    """
    for attempt in range(ATTEMPTS):
        try:
            storage.rename(temporary, target)
            return True
        except OSError as error:
            if error.errno not in TAKEN:
                raise
            if is_whole():
                return False
            if attempt == ATTEMPTS - 1:
                raise
        # A broken checkpoint has the name. Killed between these two renames, nothing that could
        # have been loaded is lost.
        condemned = folders.condemned(target)
        with contextlib.suppress(FileNotFoundError):
            storage.rename(target, condemned)
    raise AssertionError("the loop returns or raises")
