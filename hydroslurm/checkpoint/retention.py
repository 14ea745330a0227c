"""Removes the checkpoints of a folder that need not be kept, and what dead saves left there."""

from __future__ import annotations

import warnings
from pathlib import Path

from hydroslurm.checkpoint import commit
from hydroslurm.checkpoint.catalog import Checkpoint, beyond, look
from hydroslurm.checkpoint.checking import Checker
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.errors import CheckpointError


def prune(
    directory: Path, *, keep: int, keep_stop: int, checker: Checker, storage: Storage
) -> tuple[Path, ...]:
    """Remove older checkpoints, and what killed saves left; the checkpoints that were removed.

    ``keep`` of all kinds but "stop" and ``keep_stop`` of that one stay; at least two in all, and
    the newest good one whatever its age. A failure costs a RuntimeWarning.
    """
    removed: list[Path] = []
    try:
        for one in _dispensable(
            directory, keep=keep, keep_stop=keep_stop, checker=checker, storage=storage
        ):
            commit.remove(one.path, storage=storage)
            removed.append(one.path)
        commit.remove_leftovers(directory, storage=storage)
    except (OSError, CheckpointError) as error:
        warnings.warn(
            f"hydroslurm: old checkpoints in {directory} could not be removed ({error}); "
            "new ones are not affected, but the disk will fill up",
            RuntimeWarning,
            stacklevel=3,
        )
    return tuple(removed)


def _dispensable(
    directory: Path, *, keep: int, keep_stop: int, checker: Checker, storage: Storage
) -> list[Checkpoint]:
    found = [one for one in look(directory, storage=storage) if isinstance(one, Checkpoint)]
    rest = beyond(found, keep=keep, keep_stop=keep_stop)
    for one in reversed(found):
        if checker.is_good(one):
            return [other for other in rest if other != one]
    return []
