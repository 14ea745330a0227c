"""I/O calls that fail: a clear error, and what was committed before loads."""

from __future__ import annotations

import errno
import resource
import signal
import warnings
from pathlib import Path

import pytest
import torch
from checkpoint.faulty import NUMBERS, CountingStorage, failing
from checkpoint.states import holds, newest_in, state_of, write

from hydroslurm.checkpoint import checksummed_file
from hydroslurm.checkpoint.store import CheckpointStore, Retention, State
from hydroslurm.errors import CheckpointCorrupt, SaveFailed

LIMIT = 500
"""More than the calls of any save here."""


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for-good"])
@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("base", [False, True], ids=["written", "linked"])
def test_failure_at_every_call(
    quick_folder: Path,
    base: bool,
    number: int,
    for_good: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever call of a save fails, once or from then on: SaveFailed says so, the state before
    or the new one loads, no descriptor stays open, and the next save works; also where files of the
    checkpoint before are linked."""
    monkeypatch.setattr(checksummed_file, "CHUNK_BYTES", 16384)
    folder = quick_folder / "checkpoints"
    good = CheckpointStore(folder)
    write(good, state_of(0, base=base), step=0, kind="periodic")
    open_before = _open_files()
    for at in range(1, LIMIT):
        storage = failing(at, number, for_good=for_good)
        store = CheckpointStore(folder, storage=storage)
        for before in good.committed():
            store.frozen.note(before)
        said = None
        try:
            write(store, state_of(at, base=base), step=at, kind="periodic")
        except SaveFailed as error:
            said = str(error)
        assert said is None or f"step {at} could not be saved" in said
        found = newest_in(CheckpointStore(folder))
        assert found is not None
        assert found.step == at or (said and found.step == at - 1)
        assert holds(good, found, found.step)
        assert _open_files() == open_before
        if len(storage.calls) < at:
            assert ("link" in storage.calls) == base
            return
        write(good, state_of(at, base=base), step=at, kind="periodic")
        good.prune(Retention(keep=1))
    pytest.fail(f"a save makes more than {LIMIT} calls")


def test_a_failing_prune_costs_a_warning(tmp_path: Path) -> None:
    """Old checkpoints that cannot be removed do not end a training, and no half of one is left
    under its name."""
    for at in range(1, LIMIT):
        folder = tmp_path / str(at)
        for step in range(3):
            write(CheckpointStore(folder), state_of(step), step=step, kind="periodic")
        storage = failing(at, errno.EACCES, for_good=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            CheckpointStore(folder, storage=storage).prune(Retention(keep=1))
        for one in CheckpointStore(folder).committed():
            CheckpointStore(folder).verify(one)
        assert len(CheckpointStore(folder).committed()) >= 2
        if len(storage.calls) < at:
            assert not caught
            return
        # a failing read makes a checkpoint look bad for once, which keeps more of them
        assert len(caught) <= 1
    pytest.fail(f"pruning makes more than {LIMIT} calls")


def test_the_write_back_hint_may_fail(tmp_path: Path) -> None:
    """A file system that does not know the hint gets its checkpoints all the same."""

    def before(n: int, name: str) -> None:
        if name == "write_back":
            raise OSError(errno.EINVAL, "no such advice here")

    store = CheckpointStore(tmp_path, storage=CountingStorage(before))
    assert holds(store, write(store, state_of(1), step=1, kind="periodic"), 1)


def test_the_read_ahead_hint_may_fail(tmp_path: Path) -> None:
    """Nor does a load need its hint; and one of a damaged file with many tasks under way ends."""

    def before(n: int, name: str) -> None:
        if name == "read_ahead":
            raise OSError(errno.EINVAL, "no such advice here")

    done = write(
        CheckpointStore(tmp_path),
        State({"x": torch.arange(40_000_000)}, {}),
        step=1,
        kind="periodic",
    )
    storage = CountingStorage(before)
    loaded = CheckpointStore(tmp_path, storage=storage).load(done).shared["x"]
    assert torch.equal(loaded, torch.arange(40_000_000))
    assert storage.calls.count("read_ahead") > 30
    open_before = _open_files()
    for at_bytes in (10, 300_000_000):
        with (done.path / "part-00000.safetensors").open("r+b") as file:
            file.seek(at_bytes)
            file.write(b"\xff")
        with pytest.raises(CheckpointCorrupt, match="has checksum"):
            CheckpointStore(tmp_path).load(done)
        assert _open_files() == open_before


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


def test_file_size_limit(tmp_path: Path) -> None:
    """A real limit of the kernel, met in the middle of a file, is a failed save."""
    store = CheckpointStore(tmp_path)
    write(store, state_of(1), step=1, kind="periodic")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
        with pytest.raises(SaveFailed, match="File too large"):
            write(store, state_of(2), step=2, kind="periodic")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def _open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}
