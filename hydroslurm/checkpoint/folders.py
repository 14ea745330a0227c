"""The names in a checkpoint folder, and how a checkpoint comes into being and goes.

step-000001234/                               committed: the only name that is ever believed
step-000001234.2/                             the same, saved again at this step: the newer one
.tmp-step-000001234.<place>.<pid>.<random>/   being written, or left by a save that was killed
.tmp-step-000001234.<place>.<pid>.<random>.joint/   the same of several ranks; the first named it
.old-step-000001234.<place>.<pid>.<random>/   being removed
.pin-step-000001234.<place>.<pid>.<random>/   empty: it is being loaded and must stay

The order of the calls is the whole point:

    parts, each fsynced -> manifest: written, fsynced, renamed, folder fsynced
    -> folder renamed to its final name -> parent fsynced

Wherever a save is killed, there is either a complete folder under its final name or a leftover that
nobody reads. Nothing is ever removed under its final name: it is renamed first.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from hydroslurm.checkpoint.checksummed_file import write_whole
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.core.registry import place

STALE_S = 3600.0
"""A save of another node is dead after so long without a write. A live one writes a chunk every few
milliseconds, and nobody waits an hour for a hung file server."""

JOINT_STALE_S = 600.0
"""The same for a save of several ranks whose first one is known to be dead: the others may be about
to finish the commit from other machines, which takes a few calls and not minutes."""

DRAFT = ".tmp"
"""Ends the names of files that are not in their place yet."""

_NAME = r"step-[0-9]{9,18}(?:\.(?:[2-9]|[1-9][0-9]{1,8}))?"
_STEP = re.compile(_NAME)
_LEFTOVER = re.compile(
    rf"\.(tmp|old|pin)-({_NAME})\.([0-9a-f]{{8}})\.([0-9]{{1,9}})\.[0-9a-f]+(\.joint)?"
)


def of_step(directory: Path, step: int, number: int = 1) -> Path:
    """``number``: 1 for the first save of this step, 2 for the next ..."""
    return directory / (f"step-{step:09d}" + (f".{number}" if number > 1 else ""))


def key_of(name: str) -> tuple[int, int] | None:
    """Step and number in the name of a committed folder; the newer checkpoint has the greater key.
    None for all other names."""
    if _STEP.fullmatch(name) is None:
        return None
    step, _, number = name.removeprefix("step-").partition(".")
    return int(step), int(number or 1)


def is_file_name(name: str) -> bool:
    """Whether a manifest may name this file: one in the checkpoint's folder."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def newest_number(names: Iterable[str], step: int) -> int:
    """The number of the newest save of a step among these names, 0 if there is none.

    Unfinished ones count: another thread may still commit one that it was told to give up.
    """
    unfinished = ((name, _LEFTOVER.fullmatch(name)) for name in names)
    keys = [key_of(match[2] if match and match[1] == "tmp" else name) for name, match in unfinished]
    return max((key[1] for key in keys if key is not None and key[0] == step), default=0)


def temporary(target: Path, *, joint: bool = False) -> Path:
    """A unique name for the save that becomes ``target``.

    ``joint``: for a save of several ranks; the process that chooses it sends it to the others.
    """
    path = _mine(target.parent, "tmp", target.name)
    return path.with_name(f"{path.name}.joint") if joint else path


def target_of(joint: str, step: int) -> str | None:
    """The final name of a joint save of this step in a folder of this name; None for a name that
    :func:`temporary` cannot have made."""
    match = _LEFTOVER.fullmatch(joint)
    if match is None or (match[1], match[5]) != ("tmp", ".joint"):
        return None
    key = key_of(match[2])
    return match[2] if key is not None and key[0] == step else None


def revoked(unfinished: Path) -> Path | None:
    """A new name for the folder of another process's unfinished save; None for all other names,
    including our own saves."""
    match = _LEFTOVER.fullmatch(unfinished.name)
    if match is None or match[1] != "tmp":
        return None
    if match[3] == place() and int(match[4]) == os.getpid():
        return None
    return _mine(unfinished.parent, "old", match[2])


def pin(path: Path) -> Path:
    """A name that says this process is loading a checkpoint."""
    return _mine(path.parent, "pin", path.name)


def pinned(name: str) -> str | None:
    """The checkpoint that a pin of this name keeps; None for all other names."""
    match = _LEFTOVER.fullmatch(name)
    return match[2] if match and match[1] == "pin" else None


def is_leftover(path: Path, *, now_epoch_s: float) -> bool:
    """Whether nobody is working on a ``.tmp-``, ``.old-`` or ``.pin-`` folder any more.

    Of a process on this machine, its pid tells; of one elsewhere, the age of the folder. The death
    of the process that named a joint save is not enough: another rank may be finishing it, so it
    must also have been untouched for a while.

    Raises:
        OSError: it cannot be examined; FileNotFoundError: someone else has removed it.
    """
    match = _LEFTOVER.fullmatch(path.name)
    if match is None:
        return False
    here, joint = match[3] == place(), match[5] is not None
    if here and (int(match[4]) == os.getpid() or _is_alive(int(match[4]))):
        return False
    if here and not joint:
        return True
    newest_epoch_s = max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
    return now_epoch_s - newest_epoch_s > (JOINT_STALE_S if here else STALE_S)


def _mine(directory: Path, what: str, name: str) -> Path:
    return directory / f".{what}-{name}.{place()}.{os.getpid()}.{secrets.token_hex(4)}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process: a reused pid, or a save
        return True
    return True


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
    aside = _mine(path.parent, "old", path.name)
    storage.rename(path, aside)
    # else a power cut could keep the old name and lose the files
    storage.fsync_dir(path.parent)
    remove_tree(aside, storage=storage)


def remove_tree(path: Path, *, storage: Storage) -> None:
    """Remove a folder of files; others may be removing it too.

    Raises:
        OSError: a call failed, or there is a folder inside.
    """
    with contextlib.suppress(FileNotFoundError):
        for name in storage.listdir(path):
            with contextlib.suppress(FileNotFoundError):  # another was quicker
                storage.unlink(path / name)
        storage.rmdir(path)


def remove_leftovers(directory: Path, *, storage: Storage) -> None:
    """Remove what dead saves and removals left; raises OSError."""
    now_epoch_s = time.time()
    for name in storage.listdir(directory):
        path = directory / name
        with contextlib.suppress(FileNotFoundError):
            if is_leftover(path, now_epoch_s=now_epoch_s):
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
        taken = revoked(directory / name)
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
