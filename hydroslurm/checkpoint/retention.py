"""Which checkpoints of a folder need not be kept; keeps those that somebody is loading."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hydroslurm.checkpoint import folders
from hydroslurm.checkpoint.catalog import EPOCH, Checkpoint
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.errors import UsageError

STOP = "stop"
"""The kind of checkpoint that retention counts apart: periodic saves that follow a preemption must
not push out the emergency one at once, nor a series of preemptions all the periodic ones."""

LEAST_KEPT = 2
"""One to load, and one to fall back to."""


def check_counts(*, keep: int, keep_stop: int, keep_epochs: int | None) -> None:
    """Raise UsageError for numbers of checkpoints that cannot be kept."""
    if keep < 1 or keep_stop < 0:
        raise UsageError(f"keep={keep}, keep_stop={keep_stop}: wanted keep >= 1, keep_stop >= 0")
    if keep_epochs is not None and keep_epochs < 1:
        raise UsageError(f"keep_epochs={keep_epochs}: wanted 1 or more, or None for all")


def beyond(
    checkpoints: Sequence[Checkpoint], *, keep: int, keep_stop: int, keep_epochs: int | None
) -> tuple[Checkpoint, ...]:
    """The checkpoints that retention removes, oldest first like ``checkpoints`` itself.

    The last ``keep_stop`` of kind "stop" stay, the last ``keep_epochs`` of kind "epoch" (None: all
    of them), the last ``keep`` of the other kinds, and at least the last two of all.
    """
    stops = [one for one in checkpoints if one.kind == STOP]
    epochs = [one for one in checkpoints if one.kind == EPOCH]
    others = [one for one in checkpoints if one.kind not in (STOP, EPOCH)]
    kept = others[-keep:] + (stops[-keep_stop:] if keep_stop else [])
    kept += epochs if keep_epochs is None else epochs[-keep_epochs:]
    rest = [one for one in checkpoints if one not in kept]
    while rest and len(kept) < LEAST_KEPT:
        kept.append(rest.pop())
    return tuple(rest)


def pinned(directory: Path, *, storage: Storage) -> set[str]:
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
