"""Attempts that meet in one folder of checkpoints: who may commit and remove, what is loaded."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint.faulty import CountingStorage
from checkpoint.states import holds, revoked_from_anybody, state_of, write

from hydroslurm.checkpoint import folders
from hydroslurm.checkpoint.newest import newest_good
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import CheckpointStore, Retention
from hydroslurm.core.fence import Fence
from hydroslurm.errors import StaleAttempt


def fenced(folder: Path, storage: Storage | None = None) -> tuple[CheckpointStore, Fence]:
    """The store of an attempt that has not claimed yet."""
    fence = Fence(folder / "claim.json")
    return CheckpointStore(folder / "c", storage=storage, fence=fence), fence


def steps(store: CheckpointStore) -> list[int]:
    return [one.step for one in store.committed()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_older_attempt_neither_commits_nor_removes(tmp_path: Path) -> None:
    """Its save and its retention fail with StaleAttempt and change nothing; it may still read."""
    old, old_fence = fenced(tmp_path)
    old_fence.claim()
    for step in (1, 2, 3):
        write(old, state_of(step), step=step, kind="periodic")
    new, new_fence = fenced(tmp_path)
    new_fence.claim()
    before = names(tmp_path / "c")
    with pytest.raises(StaleAttempt, match="the save of step 4"):
        write(old, state_of(4), step=4, kind="periodic")
    with pytest.raises(StaleAttempt, match="removing old checkpoints"):
        old.prune(Retention(keep=1, keep_stop=0))
    assert names(tmp_path / "c") == before
    assert holds(old, old.committed()[-1], 3)
    write(new, state_of(4), step=4, kind="periodic")
    assert new.prune(Retention(keep=1, keep_stop=0))


def test_a_claim_at_any_call_of_a_save_decides_it(tmp_path: Path) -> None:
    """Whatever call of an older attempt's save a newer one claims at: what is committed is there
    when the newer one looks, or never."""
    total, at = 1, 0
    while at < total:
        at += 1
        folder = tmp_path / str(at)
        seen: list[list[int]] = []

        def claim(n: int, _: str, at: int = at, folder: Path = folder, seen=seen) -> None:  # type: ignore[no-untyped-def]
            if n == at:
                new, fence = fenced(folder)
                fence.claim()
                new.revoke_others()
                seen.append(steps(new))

        disk = CountingStorage(claim)
        old, old_fence = fenced(folder, disk)
        old_fence.claim()
        # an older attempt is another process; of our own saves revoking keeps off
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folders, "revoked", revoked_from_anybody)
            stale = False
            try:
                write(old, state_of(1), step=1, kind="periodic")
            except StaleAttempt:
                stale = True
        total = len(disk.calls) if not stale else max(total, at + 1)
        assert seen, f"no call {at}"
        assert steps(fenced(folder)[0]) == seen[0], f"at call {at}, {disk.calls[at - 1]}"
        assert stale == (seen[0] == [])
        left = [name for name in names(folder / "c") if not name.startswith("step-")]
        assert not left, f"at call {at}: {left}"
    assert at > 20


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
    not longer."""
    writer, reader = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    write(writer, state_of(1), step=1, kind="periodic")
    with reader.pins.holding():
        found = newest_good(reader)
        assert found is not None
        for step in (2, 3, 4):
            write(writer, state_of(step), step=step, kind="periodic")
            writer.prune(Retention(keep=1, keep_stop=0))
        assert steps(writer) == [1, 3, 4]
        assert holds(reader, found.checkpoint, 1)
    writer.prune(Retention(keep=1, keep_stop=0))
    assert names(tmp_path) == ["step-000000003", "step-000000004"]


def test_what_a_load_reads_stays_by_itself(tmp_path: Path) -> None:
    """Without any choice before: retention at each call of a load takes nothing away from it."""
    writer = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        write(writer, state_of(step), step=step, kind="periodic")

    def prune(n: int, _: str) -> None:
        if n > 1:  # the first one makes the pin
            writer.prune(Retention(keep=1, keep_stop=0))

    reader = CheckpointStore(tmp_path, storage=CountingStorage(prune))
    assert holds(reader, writer.committed()[0], 1)
    writer.prune(Retention(keep=1, keep_stop=0))
    assert steps(writer) == [2, 3]


def test_the_pin_of_a_dead_process_keeps_nothing(tmp_path: Path) -> None:
    """One that was killed while it loaded: retention removes the checkpoint, and the pin."""
    writer = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        write(writer, state_of(step), step=step, kind="periodic")
    dying = (
        "import os, pathlib, signal, sys\n"
        "from hydroslurm.checkpoint.store import CheckpointStore\n"
        "store = CheckpointStore(pathlib.Path(sys.argv[1]))\n"
        "with store.pins.holding():\n"
        "    store.pins.pin(store.committed()[0].path)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", dying, str(tmp_path)], check=False, timeout=60)
    assert any(name.startswith(".pin-step-000000001.") for name in names(tmp_path))
    writer.prune(Retention(keep=1, keep_stop=0))
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
    writer, total, at = CheckpointStore(tmp_path), 1, 0
    write(writer, state_of(0), step=0, kind="periodic")
    while at < total:
        at += 1
        last = writer.committed()[-1].step

        def go_on(n: int, _: str, at: int = at, last: int = last) -> None:
            if n == at:
                for step in (last + 1, last + 2):
                    write(writer, state_of(step), step=step, kind="periodic")
                    writer.prune(Retention(keep=1, keep_stop=0))

        disk = CountingStorage(go_on)
        reader = CheckpointStore(tmp_path, storage=disk, peers=peers)
        found = newest_good(reader)
        assert found is not None
        assert found.checkpoint.step >= last, f"at call {at}"
        total = len(disk.calls)
    assert at > 5


def test_a_claim_at_any_call_of_retention_leaves_what_the_newer_one_chooses(tmp_path: Path) -> None:
    """Whatever call of an older attempt's retention a newer one claims and chooses at: it loads."""
    total, at = 1, 0
    while at < total:
        at += 1
        folder = tmp_path / str(at)
        new, new_fence = fenced(folder)
        chosen: list[int] = []

        def take_over(  # type: ignore[no-untyped-def]
            n: int, _: str, at: int = at, new=new, new_fence=new_fence, chosen=chosen
        ) -> None:
            if n == at:
                new_fence.claim()
                found = newest_good(new)
                assert found is not None
                new.pins.pin(found.checkpoint.path)
                chosen.append(found.checkpoint.step)

        disk = CountingStorage(take_over)
        old, old_fence = fenced(folder, disk)
        old_fence.claim()
        for step in (1, 2, 3, 4):
            write(fenced(folder)[0], state_of(step), step=step, kind="periodic")
        with new.pins.holding():
            with contextlib.suppress(StaleAttempt):
                old.prune(Retention(keep=1, keep_stop=0))
            total = max(total, len(disk.calls))
            assert chosen == [4], f"at call {at}"
            assert holds(new, new.committed()[-1], 4)
            assert len(new.committed()) >= 2
    assert at > 10
