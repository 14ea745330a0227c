"""File systems that stop, or break, where a test wants them to."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

from hydroslurm.checkpoint.storage import Storage


class BrokenDisk(Storage):
    """Has no space left for the steps it is told to."""

    def __init__(self, *steps: int) -> None:
        self._steps = [f"step-{step:09d}" for step in steps]

    def is_of(self, path: Path) -> bool:
        """Whether a file is of one of the steps."""
        return any(name in str(path) for name in self._steps)

    def create(self, path: Path) -> int:
        if self.is_of(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return super().create(path)


class HeldDisk(BrokenDisk):
    """Holds every file of the steps until it is let go, as a disk that hangs does; ``reached`` is
    set when the first one is held."""

    def __init__(self, *steps: int) -> None:
        super().__init__(*steps)
        self.reached, self.let_go = threading.Event(), threading.Event()

    def hold(self, step: int) -> None:
        self._steps.append(f"step-{step:09d}")

    def create(self, path: Path) -> int:
        if self.is_of(path):
            self.reached.set()
            assert self.let_go.wait(60)
        return Storage.create(self, path)


class SlowSync(HeldDisk):
    """Holds the first sync of the steps instead, which fails when it is let go."""

    def create(self, path: Path) -> int:
        self._is_held = self.is_of(path)
        return Storage.create(self, path)

    def fsync(self, fd: int) -> None:
        if self._is_held and not self.reached.is_set():
            self.reached.set()
            assert self.let_go.wait(60)
            raise OSError(errno.EIO, "Input/output error")
        super().fsync(fd)


class SlowRemoval(HeldDisk):
    """Removes no file until it is let go."""

    def unlink(self, path: Path) -> None:
        assert self.let_go.wait(60)
        super().unlink(path)
