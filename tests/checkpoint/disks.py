"""Disks that stop, or break, where a test wants them to, and a saver above one."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import wait_until

from hydroslurm.checkpoint.saver import Saved, SaveEvent, Saver
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import CheckpointStore, State
from hydroslurm.core.events import EventKind
from hydroslurm.core.memory import Room


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
    """Holds calls of one kind for the steps until it is let go, as a disk that hangs does: each
    file that is created, or the first call of another kind, which fails then with an ``error``.
    ``reached`` is set when the first one is held."""

    def __init__(self, *steps: int, call: str = "create", error: int = 0) -> None:
        super().__init__(*steps)
        self._call, self._error = call, error
        self.reached, self.let_go = threading.Event(), threading.Event()

    def hold(self, step: int) -> None:
        self._steps.append(f"step-{step:09d}")

    def _meet(self, call: str, path: Path) -> None:
        is_due = call == "create" or not self.reached.is_set()
        if call == self._call and is_due and self.is_of(path):
            self.reached.set()
            assert self.let_go.wait(60)
            if self._error:
                raise OSError(self._error, os.strerror(self._error))

    def create(self, path: Path) -> int:
        self._meet("create", path)
        return Storage.create(self, path)

    def fsync(self, fd: int) -> None:
        self._meet("fsync", Path(f"/proc/self/fd/{fd}").readlink())
        super().fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._meet("rename", target)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._meet("unlink", path)
        super().unlink(path)


class LateFolder(Storage):
    """Does not look for the number of its first save before another save has a folder, or has had
    the time to make one."""

    is_armed = False

    def __init__(self) -> None:
        self._made = threading.Event()

    def listdir(self, path: Path) -> list[str]:
        if self.is_armed:
            self.is_armed = False
            self._made.wait(1.0)
        return super().listdir(path)

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        if path.name.startswith(".tmp"):
            self._made.set()


def state_of(value: float) -> State:
    return State(shared={"model": {"w": torch.full((1000,), value)}}, own={"n": value})


def no_room() -> Room:
    return Room(free_bytes=3000, limit_bytes=10_000, used_bytes=6000, bound="the limit of a test")


class Saving:
    """A saver above a disk, of one of several ranks if there are ``peers``. The disk is let go at
    the first event named by ``until``, as ``(kind of save, kind of event)``."""

    def __init__(
        self,
        folder: Path,
        disk: Any = None,
        *,
        peers: Any = None,
        state: Callable[[int], State] = state_of,
        until: Any = None,
        **options: Any,
    ) -> None:
        self.disk, self.state = disk, state
        self.store = CheckpointStore(folder, storage=disk, peers=peers, patience_s=60)
        self.told: list[SaveEvent] = []
        self._until = until
        self.saver = Saver(self.store, tell=self._tell, **options)

    def _tell(self, event: SaveEvent) -> None:
        self.told.append(event)
        if (event.save_kind, event.kind) == self._until:
            self.disk.let_go.set()

    def start(self, step: int, state: Any = None) -> float:
        """A periodic save; in the state is its step. On a disk that holds it, until it is held."""
        took_s = self.saver.start(state or self.state(step), step=step)
        if isinstance(self.disk, HeldDisk) and self.disk.is_of(Path(f"step-{step:09d}")):
            assert self.disk.reached.wait(60)
        return took_s

    def stop(self, step: int, left_s: float = 600, state: Any = None, **options: Any) -> Saved:
        """A save before a deadline."""
        deadline_s = time.monotonic() + left_s
        return self.saver.save_by(
            state or self.state(step), step=step, deadline_mono_s=deadline_s, **options
        )

    def end(self) -> None:
        """Let the disk go on, and close."""
        if isinstance(self.disk, HeldDisk):
            self.disk.let_go.set()
        self.saver.close()

    def steps_told(self, kind: EventKind) -> list[int]:
        return [event.step for event in self.told if event.kind is kind]

    def reason(self, step: int, *kinds: EventKind) -> str:
        """Of the first event of this step that is one of these, once there is one."""
        wait_until(lambda: bool(self._of(step, kinds)), f"{kinds} of step {step}")
        return self._of(step, kinds)[0].reason

    def _of(self, step: int, kinds: tuple[EventKind, ...]) -> list[SaveEvent]:
        return [event for event in self.told if event.step == step and event.kind in kinds]

    @property
    def values(self) -> dict[int, tuple[float, float]]:
        """Of each committed step what its tensor and its plain value were."""
        found = {}
        for one in self.store.committed():
            state = self.store.load(one)
            (value,) = state.shared["model"]["w"].unique()
            found[one.step] = float(value), state.own["n"]
        return found

    @property
    def steps(self) -> list[int]:
        return [one.step for one in self.store.committed()]
