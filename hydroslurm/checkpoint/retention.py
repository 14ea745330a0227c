"""Removes the checkpoints of a folder that need not be kept, and what dead saves left there; keeps
those that somebody is loading."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


class Pins:
    """Keep checkpoints that this process loads from everybody's retention; of one store."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._held: dict[Path, Path] | None = None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Nobody's retention removes what is pinned or verified within this context before its end:
        for the time between choosing a checkpoint and having loaded it."""
        if self._held is not None:  # within another one, which lasts longer
            yield
            return
        self._held = {}
        try:
            yield
        finally:
            held, self._held = self._held, None
            for pin in held.values():
                with suppress(OSError):
                    self._storage.rmdir(pin)

    def pin(self, path: Path) -> None:
        """Keep a checkpoint until the end of :meth:`holding`; outside of that context this does
        nothing. A process that may only read the folder cannot pin, and takes the chance."""
        if self._held is None or path in self._held or folders.key_of(path.name) is None:
            return
        pin = folders.pin(path)
        with suppress(OSError):
            self._storage.mkdir(pin)
            self._held[path] = pin
