"""Attempts that meet in one folder of checkpoints: who may commit and remove, what is loaded."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint.faulty import CountingStorage
from checkpoint.states import holds, state_of, write

from hydroslurm.checkpoint import folders
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import CheckpointStore, Retention, newest_good
from hydroslurm.core.fence import Fence
from hydroslurm.errors import StaleAttempt

LEAST = Retention(keep=1, keep_stop=0)


def fenced(folder: Path, storage: Storage | None = None) -> tuple[CheckpointStore, Fence]:
    """The store of an attempt that has not claimed yet."""
    fence = Fence(folder / "claim.json")
    return CheckpointStore(folder / "c", storage=storage, fence=fence), fence


def steps(store: CheckpointStore) -> list[int]:
    return [one.step for one in store.committed()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def at_each_call(scene: Callable[[int], int], *, least: int) -> None:
    """A scene in which something happens at its n-th I/O call, and which tells how many it has."""
    total, at = 1, 0
    while at < total:
        at += 1
        total = max(total, scene(at))
    assert at > least


def test_revoking_keeps_off_our_own_saves_and_all_that_is_committed(tmp_path: Path) -> None:
    """A save of another process is taken away; one of this process, a pin and a checkpoint stay."""
    store, _ = fenced(tmp_path)
    write(store, state_of(1), step=1, kind="periodic")
    mine = folders.temporary(folders.of_step(store.directory, 2))
    theirs = store.directory / f".tmp-step-000000003.{folders.place()}.1.abcd0123.joint"
    pin = folders.pin(store.directory / "step-000000001")
    for folder in (mine, theirs, pin):
        folder.mkdir()
    (theirs / "part").touch()
    store.revoke_others()
    assert names(store.directory) == sorted([mine.name, pin.name, "step-000000001"])
    CheckpointStore(tmp_path / "none").revoke_others()


def test_what_is_being_loaded_stays(tmp_path: Path) -> None:
    """Retention of any process keeps a checkpoint from its choice to the end of its loading, and
    not longer; also at each call of a load that nothing was chosen for."""
    writer = CheckpointStore(tmp_path)
    write(writer, state_of(1), step=1, kind="periodic")
    with writer.holding():
        found = newest_good(writer)
        assert found is not None
        for step in (2, 3, 4):
            write(writer, state_of(step), step=step, kind="periodic")
            CheckpointStore(tmp_path).prune(LEAST)
        assert steps(writer) == [1, 3, 4]
        assert holds(writer, found, 1)

    def prune(n: int, _: str) -> None:
        if n > 1:  # the first one makes the pin
            CheckpointStore(tmp_path).prune(LEAST)

    reader = CheckpointStore(tmp_path, storage=CountingStorage(prune))
    assert holds(reader, writer.committed()[0], 1)
    writer.prune(LEAST)
    assert names(tmp_path) == ["step-000000003", "step-000000004"]


def test_the_pin_of_a_dead_process_keeps_nothing(tmp_path: Path) -> None:
    """One that was killed while it loaded: retention removes the checkpoint, and the pin."""
    writer = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        write(writer, state_of(step), step=step, kind="periodic")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
        pid = os.fork()
    if pid == 0:
        with writer.holding():
            writer.pin(writer.committed()[0].path)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert any(name.startswith(".pin-step-000000001.") for name in names(tmp_path))
    writer.prune(LEAST)
    assert names(tmp_path) == ["step-000000002", "step-000000003"]


def test_who_cannot_pin_can_load(tmp_path: Path) -> None:
    """A colleague's folder, a read-only file system."""

    class ReadOnly(Storage):
        def mkdir(self, path: Path) -> None:
            raise PermissionError(13, "Permission denied", str(path))

    write(CheckpointStore(tmp_path), state_of(1), step=1, kind="periodic")
    reader = CheckpointStore(tmp_path, storage=ReadOnly())
    assert holds(reader, reader.committed()[0], 1)


class Echo:
    """Peers of rank 0 that answer as it does."""

    rank = 0
    world_size = 2

    def agree(self, topic: str, value: Any, **_: Any) -> dict[int, Any]:
        return dict.fromkeys(range(self.world_size), value)


@pytest.mark.parametrize("peers", [None, Echo()], ids=["alone", "several ranks"])
def test_what_vanishes_while_it_is_looked_for_is_looked_for_again(
    peers: Echo | None, tmp_path: Path
) -> None:
    """Another process commits and removes between the list and the first byte that is read, at
    whatever call that is: the newest is found, without a warning."""
    writer = CheckpointStore(tmp_path)
    write(writer, state_of(0), step=0, kind="periodic")

    def scene(at: int) -> int:
        last = writer.committed()[-1].step

        def go_on(n: int, _: str) -> None:
            if n == at:
                for step in (last + 1, last + 2):
                    write(writer, state_of(step), step=step, kind="periodic")
                    writer.prune(LEAST)

        disk = CountingStorage(go_on)
        found = newest_good(CheckpointStore(tmp_path, storage=disk, peers=peers))
        assert found is not None
        assert found.step >= last, f"at call {at}"
        return len(disk.calls)

    at_each_call(scene, least=5)


def test_a_claim_at_any_call_of_retention_leaves_what_the_newer_one_chooses(tmp_path: Path) -> None:
    """Whatever call of an older attempt's retention a newer one claims and chooses at: it loads,
    and from then on the older one removes nothing."""
    good = CheckpointStore(tmp_path / "good")
    for step in (1, 2, 3, 4):
        write(good, state_of(step), step=step, kind="periodic")

    def scene(at: int) -> int:
        folder = tmp_path / str(at)
        shutil.copytree(good.directory, folder / "c")
        new, new_fence = fenced(folder)
        chosen: list[int] = []

        def take_over(n: int, _: str) -> None:
            if n == at:
                new_fence.claim()
                found = newest_good(new)
                assert found is not None
                new.pin(found.path)
                chosen.append(found.step)

        disk = CountingStorage(take_over)
        old, old_fence = fenced(folder, disk)
        old_fence.claim()
        with new.holding():
            with contextlib.suppress(StaleAttempt):
                old.prune(LEAST)
            calls = len(disk.calls)
            assert chosen == [4], f"at call {at}"
            assert holds(new, new.committed()[-1], 4)
            before = steps(new)
            with pytest.raises(StaleAttempt, match="removing old checkpoints"):
                old.prune(LEAST)
            assert steps(new) == before
        return calls

    at_each_call(scene, least=10)
