"""File systems that stop, or break, where a test wants them to."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

from hydroslurm.checkpoint.storage import Storage


class HeldDisk(Storage):
    """Holds every file of the steps it is told to, until it is let go, as a disk that hangs does.

    Attributes:
        reached: set when the first write is held.
        let_go: set it to go on.
    """

    def __init__(self, *steps: int) -> None:
        self.reached = threading.Event()
        self.let_go = threading.Event()
        self._held = [f"step-{step:09d}" for step in steps]

    def hold(self, step: int) -> None:
        self._held.append(f"step-{step:09d}")

    def create(self, path: Path) -> int:
        if any(name in str(path) for name in self._held):
            self.reached.set()
            assert self.let_go.wait(60)
        return super().create(path)


class SlowSync(Storage):
    """Holds the first sync of the steps it is told to, until it is let go, and fails then.

    Attributes:
        reached: set when it is held.
        let_go: set it to go on.
    """

    def __init__(self, *steps: int) -> None:
        self.reached = threading.Event()
        self.let_go = threading.Event()
        self._held = tuple(f"step-{step:09d}" for step in steps)
        self._is_held = False

    def create(self, path: Path) -> int:
        self._is_held = any(name in str(path) for name in self._held)
        return super().create(path)

    def fsync(self, fd: int) -> None:
        if self._is_held and not self.reached.is_set():
            self.reached.set()
            assert self.let_go.wait(60)
            raise OSError(errno.EIO, "Input/output error")
        super().fsync(fd)


class SlowRemoval(Storage):
    """Removes no file until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def unlink(self, path: Path) -> None:
        assert self.let_go.wait(60)
        super().unlink(path)


class BrokenDisk(Storage):
    """Has no space left for the steps it is told to."""

    def __init__(self, *steps: int) -> None:
        self.steps = {f"step-{step:09d}" for step in steps}

    def create(self, path: Path) -> int:
        if any(name in str(path) for name in self.steps):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return super().create(path)
