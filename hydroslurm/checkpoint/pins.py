"""Keeps checkpoints that are being loaded from everybody's retention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hydroslurm.checkpoint import folders
from hydroslurm.checkpoint.storage import Storage


class Pins:
    """Those of one store, made by this process."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._held: dict[Path, Path] | None = None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """What is pinned or verified within it is not removed by anybody's retention before its
        end: for the time between choosing a checkpoint and having loaded it."""
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
        """Keep a checkpoint until the end of :meth:`holding`; outside of one this does nothing. Who
        may only read the folder cannot, and takes the chance."""
        if self._held is None or path in self._held or folders.key_of(path.name) is None:
            return
        pin = folders.pin(path)
        with suppress(OSError):
            self._storage.mkdir(pin)
            self._held[path] = pin
