"""I/O calls that fail, and power that is cut at each: what was committed before loads."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint.faulty import CountingStorage, PowerCut, PowerCutStorage, failing
from checkpoint.states import holds, state_of, write

from hydroslurm.checkpoint import checksummed_file, folders
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import CheckpointStore, Retention, State, newest_good
from hydroslurm.errors import CheckpointCorrupt, SaveFailed

LIMIT = 500
"""More than the calls of any save here."""

NUMBERS = {"ENOSPC": errno.ENOSPC, "EACCES": errno.EACCES, "EIO": errno.EIO}
WAYS = [*itertools.product(("written", "linked"), NUMBERS, ("once", "for good"))]
QUICK = [*itertools.product(("written",), ("ENOSPC",), ("once", "for good"))]
QUICK += [("linked", "EACCES", "once"), ("linked", "EIO", "for good")]


@pytest.mark.parametrize(
    ("base", "number", "how"),
    [pytest.param(*way, marks=[] if way in QUICK else pytest.mark.long) for way in WAYS],
)
def test_failure_at_every_call(
    quick_folder: Path, base: str, number: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call of a save fails, once or from then on: SaveFailed says so, the state before
    or the new one loads, no descriptor stays open, and the next save works; also where files of the
    checkpoint before are linked."""
    monkeypatch.setattr(checksummed_file, "CHUNK_BYTES", 16384)
    folder = quick_folder / "checkpoints"
    good = CheckpointStore(folder)
    has_base = base == "linked"
    write(good, state_of(0, base=has_base), step=0, kind="periodic")
    open_before = _open_files()
    for at in range(1, LIMIT):
        storage = failing(at, NUMBERS[number], for_good=how == "for good")
        store = CheckpointStore(folder, storage=storage)
        for before in good.committed():
            store.frozen.note(before)
        said = None
        try:
            write(store, state_of(at, base=has_base), step=at, kind="periodic")
        except SaveFailed as error:
            said = str(error)
        assert said is None or f"step {at} could not be saved" in said
        found = newest_good(CheckpointStore(folder))
        assert found is not None
        assert found.step == at or (said and found.step == at - 1)
        assert holds(good, found, found.step)
        assert _open_files() == open_before
        if len(storage.calls) < at:
            assert ("link" in storage.calls) == has_base
            return
        write(good, state_of(at, base=has_base), step=at, kind="periodic")
        good.prune(Retention(keep=1))
    pytest.fail(f"a save makes more than {LIMIT} calls")


def test_hints_may_fail(tmp_path: Path) -> None:
    """A file system that knows none gets its checkpoints, and loads them, all the same."""

    def before(n: int, name: str) -> None:
        if name in ("write_back", "read_ahead"):
            raise OSError(errno.EINVAL, "no such advice here")

    storage = CountingStorage(before)
    store = CheckpointStore(tmp_path, storage=storage)
    numbers = torch.arange(3_000_000)
    done = write(store, State({"x": numbers}, {}), step=1, kind="periodic")
    assert torch.equal(store.load(done).shared["x"], numbers)
    assert min(map(storage.calls.count, ("write_back", "read_ahead"))) > 1


def test_unreadable_files_are_corrupt(tmp_path: Path) -> None:
    """An error of the disk while reading is told as a checkpoint that cannot be trusted."""
    done = write(CheckpointStore(tmp_path), state_of(1), step=1, kind="periodic")
    said: list[str] = []
    for at in range(1, LIMIT):
        storage = failing(at, errno.EIO, for_good=False)
        store = CheckpointStore(tmp_path, storage=storage)
        try:
            store.verify(done)
        except CheckpointCorrupt as error:
            said.append(str(error))
        if len(storage.calls) < at:
            break
    assert len(said) >= 10
    assert all(str(done.path) in one for one in said)


def _open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


# --- power cuts: the order of fsyncs


def saves(folder: Path, storage: PowerCutStorage, *, base: bool = False) -> None:
    store = CheckpointStore(folder, storage=storage)
    for before in CheckpointStore(folder).committed() if base else ():
        store.frozen.note(before)
    write(store, state_of(2, base=base), step=2, kind="periodic")
    store.prune(Retention(keep=1))


def cut_short(work: Callable[[], object]) -> bool:
    """Whether the work came to its end."""
    try:
        work()
    except PowerCut:
        return False
    return True


@pytest.mark.parametrize(
    "base", [pytest.param(False, marks=pytest.mark.long), True], ids=["written", "linked"]
)
@pytest.mark.parametrize("names", [True, False], ids=["names-lost", "contents-lost"])
def test_power_cut_at_every_call(quick_folder: Path, names: bool, base: bool) -> None:
    """Without power from any call on, an old or the new state loads, and what write() returned is
    never lost; also where files of the checkpoint before are linked. Whatever has the name of a
    checkpoint is whole, also one that was being removed."""
    before = quick_folder / "before"
    for step in (0, 1):
        write(CheckpointStore(before), state_of(step, base=base), step=step, kind="periodic")
    for cut in range(1, LIMIT):
        folder = shutil.copytree(before, quick_folder / str(cut))
        storage = PowerCutStorage(cut)
        survived = cut_short(
            lambda folder=folder, storage=storage: saves(folder, storage, base=base)
        )
        assert ("link" in storage.calls) == base or not survived
        storage.lose(folder, names=names)
        store = CheckpointStore(folder)
        found = newest_good(store)
        assert found is not None, f"nothing loads after call {cut}"
        assert found.step == 2 or (found.step == 1 and not survived)
        assert holds(store, found, found.step)
        assert store.problems() == {}
        for one in store.committed():
            store.verify(one)
        if survived:
            return
    pytest.fail(f"a save makes more than {LIMIT} calls")


def test_first_save_survives_a_power_cut_in_new_folders(tmp_path: Path) -> None:
    """The folders above the first checkpoint are durable when write() returns."""
    storage, deep = PowerCutStorage(LIMIT), tmp_path / "new" / "deep"
    write(CheckpointStore(deep, storage=storage), state_of(2), step=2, kind="periodic")
    storage.lose(tmp_path, names=True)
    store = CheckpointStore(deep)
    found = newest_good(store)
    assert found is not None
    assert holds(store, found, 2)


def test_a_short_write_is_continued(tmp_path: Path) -> None:
    """A pipe takes a part of the data at a time, as a signal can make a file do; all arrives."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    data = os.urandom(1 << 14)
    Storage().write(write_end, memoryview(data))
    assert os.read(read_end, 1 << 16) == data
    os.close(read_end)
    os.close(write_end)


def test_what_no_checkpoint_has(tmp_path: Path) -> None:
    """A file that another process has removed is no error. A link to a folder is unlinked like a
    file, and what it leads to stays. Of a folder in it the removal tells retention."""

    class Slower(Storage):
        def unlink(self, path: Path) -> None:
            if path.stem.endswith("7"):
                path.unlink()  # the other process was faster
            super().unlink(path)

    deep = tmp_path / "checkpoint" / "000"
    deep.mkdir(parents=True)
    (deep / "part-00000.json").touch()
    with pytest.raises(OSError, match="directory"):
        folders.remove_tree(tmp_path / "checkpoint", storage=Storage())
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "000").symlink_to(deep)
    for number in range(9):
        (folder / f"part-{number:05}.json").touch()
    folders.remove_tree(folder, storage=Slower())
    assert not folder.exists()
    assert (deep / "part-00000.json").exists()
