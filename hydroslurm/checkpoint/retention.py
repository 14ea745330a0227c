"""Removes the checkpoints of a folder that need not be kept, and what dead saves left there."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path

from hydroslurm.checkpoint import commit, folders
from hydroslurm.checkpoint.catalog import Checkpoint, beyond, look
from hydroslurm.checkpoint.checking import Checker
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.errors import CheckpointError


def prune(
    directory: Path,
    *,
    keep: int,
    keep_stop: int,
    keep_epochs: int | None,
    checker: Checker,
    may_prune: Callable[[], None],
    storage: Storage,
) -> tuple[Path, ...]:
    """Remove older checkpoints, and what killed saves left; the checkpoints that were removed.

    ``catalog.beyond`` says what stays; the newest good one stays whatever its age, and so does one
    that is being loaded. A failure costs a RuntimeWarning. ``may_prune`` is called before each
    removal, and ends it by raising.
    """
    removed: list[Path] = []
    try:
        found = [one for one in look(directory, storage=storage) if isinstance(one, Checkpoint)]
        rest = beyond(found, keep=keep, keep_stop=keep_stop, keep_epochs=keep_epochs)
        newest_good = next((one for one in reversed(found) if checker.is_good(one)), None)
        for one in () if newest_good is None else rest:
            if one == newest_good:
                continue
            may_prune()
            if one.path.name not in _pinned(directory, storage=storage):
                commit.remove(one.path, storage=storage)
                removed.append(one.path)
        may_prune()
        commit.remove_leftovers(directory, storage=storage)
    except (OSError, CheckpointError) as error:
        warnings.warn(
            f"hydroslurm: old checkpoints in {directory} could not be removed ({error}); "
            "new ones are not affected, but the disk will fill up",
            RuntimeWarning,
            stacklevel=3,
        )
    return tuple(removed)


def _pinned(directory: Path, *, storage: Storage) -> set[str]:
    """What somebody is loading. A pin is one more leftover when its process is gone."""
    now_epoch_s = time.time()
    return {
        pinned
        for name in storage.listdir(directory)
        if (pinned := folders.pinned(name)) is not None
        and not _is_gone(directory / name, now_epoch_s=now_epoch_s)
    }


def _is_gone(pin: Path, *, now_epoch_s: float) -> bool:
    try:
        return folders.is_leftover(pin, now_epoch_s=now_epoch_s)
    except FileNotFoundError:  # loaded just now
        return True
