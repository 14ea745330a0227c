"""The order of fsyncs: what is left after a power cut at every call."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from checkpoint.faulty import PowerCut, PowerCutStorage
from checkpoint.states import holds, newest_in, state_of, write

from hydroslurm.checkpoint import commit
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import CheckpointStore, Retention

CUTS = 400
"""More than the calls of any save here."""


def saves(folder: Path, storage: PowerCutStorage, *, base: bool = False) -> None:
    store = CheckpointStore(folder, storage=storage)
    for before in CheckpointStore(folder).committed() if base else ():
        store.frozen.note(before)
    write(store, state_of(2, base=base), step=2, kind="periodic")
    store.prune(Retention(keep=1))


def first_saves(folder: Path, storage: PowerCutStorage) -> None:
    write(
        CheckpointStore(folder / "new" / "deep", storage=storage),
        state_of(2),
        step=2,
        kind="periodic",
    )


@pytest.mark.parametrize("base", [False, True], ids=["written", "linked"])
@pytest.mark.parametrize("names", [True, False], ids=["names-lost", "contents-lost"])
def test_power_cut_at_every_call(quick_folder: Path, names: bool, base: bool) -> None:
    """Without power from any call on, an old or the new state loads, and what write() returned is
    never lost; also where files of the checkpoint before are linked. Whatever has the name of a
    checkpoint is whole, also one that was being removed."""
    before = quick_folder / "before"
    for step in (0, 1):
        write(CheckpointStore(before), state_of(step, base=base), step=step, kind="periodic")
    for cut in range(1, CUTS):
        folder = shutil.copytree(before, quick_folder / str(cut))
        storage = PowerCutStorage(cut)
        survived = cut_short(
            lambda folder=folder, storage=storage: saves(folder, storage, base=base)
        )
        assert ("link" in storage.calls) == base or not survived
        storage.lose(folder, names=names)
        store = CheckpointStore(folder)
        found = newest_in(store)
        assert found is not None, f"nothing loads after call {cut}"
        assert found.step == 2 or (found.step == 1 and not survived)
        assert holds(store, found, found.step)
        assert store.problems() == {}
        for one in store.committed():
            store.verify(one)
        if survived:
            return
    pytest.fail(f"a save makes more than {CUTS} calls")


def test_first_save_survives_a_power_cut_in_new_folders(tmp_path: Path) -> None:
    """The folders above the first checkpoint are durable when write() returns."""
    storage = PowerCutStorage(CUTS)
    assert cut_short(lambda: first_saves(tmp_path, storage))
    storage.lose(tmp_path, names=True)
    store = CheckpointStore(tmp_path / "new" / "deep")
    found = newest_in(store)
    assert found is not None
    assert holds(store, found, 2)


@pytest.mark.parametrize("deaf", ["fsync", "fsync_dir"])
def test_power_cut_finds_a_missing_fsync(tmp_path: Path, deaf: str) -> None:
    """The simulation has teeth: a save whose fsyncs do nothing is lost."""
    write(CheckpointStore(tmp_path), state_of(1), step=1, kind="periodic")
    storage = PowerCutStorage(CUTS, deaf=frozenset([deaf]))
    assert cut_short(lambda: saves(tmp_path, storage))
    storage.lose(tmp_path, names=True)
    if deaf == "fsync":
        with pytest.warns(RuntimeWarning, match="step-000000002"):
            found = newest_in(CheckpointStore(tmp_path))
    else:
        found = newest_in(CheckpointStore(tmp_path))
    assert found is not None
    assert found.step == 1


def test_a_short_write_is_continued(tmp_path: Path) -> None:
    """A pipe takes a part of the data at a time, as a signal can make a file do; all arrives."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    data = os.urandom(1 << 14)
    Storage().write(write_end, memoryview(data))
    assert os.read(read_end, 1 << 16) == data
    os.close(read_end)
    os.close(write_end)


def cut_short(work: Callable[[], None]) -> bool:
    """Whether the work came to its end."""
    try:
        work()
    except PowerCut:
        return False
    return True


def test_a_folder_of_many_files_is_removed_by_several_threads(tmp_path: Path) -> None:
    """Also while another process removes some of them."""

    class Counting(Storage):
        threads: ClassVar[set[str]] = set()

        def unlink(self, path: Path) -> None:
            self.threads.add(threading.current_thread().name)
            time.sleep(0.001)  # what a file server takes
            if path.name.endswith("7"):
                path.unlink()  # the other process was faster
            super().unlink(path)

    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(3 * commit.FEW_FILES):
        (folder / f"part-{number:05}.json").touch()
    commit.remove_tree(folder, storage=Counting())
    assert not folder.exists()
    assert len(Counting.threads) > 1


def test_a_link_in_a_folder_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    """A link to a folder is unlinked like a file."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "part-00000.json").touch()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "000").symlink_to(precious)
    commit.remove_tree(folder, storage=Storage())
    assert not folder.exists()
    assert (precious / "part-00000.json").exists()


def test_folders_that_no_checkpoint_has_stay(tmp_path: Path) -> None:
    """However deep somebody has made them, the removal ends, with an error that retention knows."""
    deep = tmp_path / "checkpoint" / "000" / "001"
    deep.mkdir(parents=True)
    (deep / "part-00000.json").touch()
    with pytest.raises(OSError, match="directory"):
        commit.remove_tree(tmp_path / "checkpoint", storage=Storage())
    assert (deep / "part-00000.json").exists()
