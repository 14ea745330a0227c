"""Storages that fail, kill or lose power at the n-th I/O call of a save."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydroslurm.checkpoint.storage import Storage

READS = frozenset({"listdir", "open", "size", "read_ahead", "read"})
WRITES = (
    "mkdir",
    "create",
    "write_back",
    "fsync",
    "rename",
    "link",
    "fsync_dir",
    "unlink",
    "rmdir",
)


class CountingStorage(Storage):
    """Calls ``before(n, name)`` ahead of its n-th call, from 1; a write is met half-way through."""

    def __init__(self, before: Callable[[int, str], None] | None = None) -> None:
        self.calls: list[str] = []
        self._before = before

    def reach(self, name: str) -> None:
        self.calls.append(name)
        if self._before is not None:
            self._before(len(self.calls), name)

    def write(self, fd: int, data: memoryview) -> None:
        half = len(data) // 2
        super().write(fd, data[:half])
        self.reach("write")
        super().write(fd, data[half:])

    def close(self, fd: int) -> None:
        super().close(fd)  # first: a close that fails has closed, and a test must not leak
        self.reach("close")


def _reaching(name: str) -> Callable[..., Any]:
    real = getattr(Storage, name)

    def call(self: CountingStorage, *arguments: Any, **options: Any) -> Any:
        self.reach(name)
        return real(self, *arguments, **options)

    return call


for _name in (*READS, *WRITES):
    setattr(CountingStorage, _name, _reaching(_name))


def killing(at: int) -> CountingStorage:
    """Ends its process by SIGKILL at the call ``at``."""

    def before(n: int, name: str) -> None:
        if n == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return CountingStorage(before)


def failing(at: int, number: int, *, for_good: bool) -> CountingStorage:
    """Raises an OSError at the call ``at``; ``for_good``: at all writing calls after it too."""

    def before(n: int, name: str) -> None:
        if n == at or (for_good and n > at and name not in READS):
            raise OSError(number, os.strerror(number), name)

    return CountingStorage(before)


class PowerCut(BaseException):
    """The machine is off: nothing after it runs, cleaning up neither."""


@dataclass
class _Name:
    """A name that may be lost: of ``inode``, in the folders ``homes`` whose fsync would keep it."""

    inode: int
    homes: set[int]
    before: tuple[int, str] | None  # folder and name that it was renamed from, None when new
    link: str = ""  # the name itself, where the inode has another one


class PowerCutStorage(CountingStorage):
    """A disk that keeps only what was fsynced, and a machine that loses power at the call ``at``.

    Only then is the order of fsyncs visible: a killed process leaves its pages to the kernel. After
    the cut, :meth:`lose` puts the disk into one of the two states that are allowed by then:
    ``names=True`` loses the names that no fsync of a folder made durable (renames are undone, new
    entries gone), ``names=False`` keeps them, as a journal may, and loses the contents only.
    Removals are durable at once, which is the worst case.
    """

    def __init__(self, at: int) -> None:
        super().__init__(self._cut)
        self._at = at
        self._unsynced: set[int] = set()  # inodes with contents that are not on the disk
        self._names: list[_Name] = []

    def _cut(self, n: int, name: str) -> None:
        if n >= self._at:
            raise PowerCut

    def lose(self, folder: Path, *, names: bool) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and path.stat().st_ino in self._unsynced:
                os.truncate(path, path.stat().st_size // 3)
        for name in reversed(self._names) if names else ():
            path = _find(folder, name.inode)
            if name.link:
                home = _find(folder, next(iter(name.homes)))
                path = None if home is None else home / name.link
            if path is None:
                continue
            if name.before is None:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                continue
            home = _find(folder, name.before[0])
            if home is not None:
                path.rename(home / name.before[1])

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self._names.append(_Name(_inode(path), {_inode(path.parent)}, None))

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._names.append(_Name(_inode(path), {_inode(path.parent)}, None))
        self._unsynced.add(_inode(path))
        return fd

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self._unsynced.discard(os.fstat(fd).st_ino)

    def rename(self, source: Path, target: Path) -> None:
        before = (_inode(source.parent), source.name)
        super().rename(source, target)
        homes = {before[0], _inode(target.parent)}
        self._names.append(_Name(_inode(target), homes, before))

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self._names.append(_Name(_inode(target), {_inode(target.parent)}, None, target.name))

    def fsync_dir(self, path: Path) -> None:
        super().fsync_dir(path)
        for name in self._names:
            name.homes.discard(_inode(path))
        self._names = [name for name in self._names if name.homes]


def _inode(path: Path) -> int:
    return path.stat().st_ino


def _find(folder: Path, inode: int) -> Path | None:
    entries = (folder, *folder.rglob("*"))
    return next((path for path in entries if _inode(path) == inode), None)
