"""What is frozen is written once, and linked into the checkpoints that follow."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from checkpoint import states
from checkpoint.faulty import CountingStorage
from checkpoint.states import same

from hydroslurm.checkpoint.frozen import fingerprint, mixed
from hydroslurm.checkpoint.saver import SaveEvent, Saver
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, Retention, State, newest_good
from hydroslurm.checkpoint.write_plan import divide
from hydroslurm.core.events import EventKind
from hydroslurm.core.memory import Room
from hydroslurm.errors import SaveFailed

FILES = ("frozen-00000.json", "frozen-00000.safetensors")


class Training:
    """Of a small part above a frozen base model."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.base = {
            "w": torch.randn(300, 200, generator=generator),
            "t": torch.randn(200, 300, generator=generator).to(torch.bfloat16).t(),
            "small": torch.arange(3.0),
        }
        self.adapter = torch.zeros(200, 100)
        self.frozen = {one.data_ptr() for one in self.base.values()}

    def state(self, step: int) -> State:
        self.adapter.fill_(step)
        shared = {"model": {**self.base, "adapter": self.adapter}, "step": step}
        return State(shared=shared, own={"n": step}, frozen=self.frozen)

    def is_in(self, store: CheckpointStore, found: Checkpoint, step: int) -> bool:
        loaded, wanted = store.load(found), self.state(step)
        return same(loaded.shared, wanted.shared) and same(loaded.own, wanted.own)


def write(store: CheckpointStore, training: Training, step: int) -> Checkpoint:
    return states.write(store, training.state(step), step=step, kind="periodic")


def linked(*all_of_them: Checkpoint) -> list[list[int]]:
    """Of each checkpoint the numbers of the earlier ones whose files of what is frozen it has; no
    other file is shared."""
    found = []
    for number, one in enumerate(all_of_them):
        inodes = {name: (one.path / name).stat().st_ino for name in one.manifest.files}
        found.append([])
        for before, other in enumerate(all_of_them[:number]):
            files = {path.stat().st_ino for path in other.path.iterdir()}
            shared = sorted(name for name, inode in inodes.items() if inode in files)
            assert shared in ([], list(FILES))
            found[-1] += [before] if shared else []
    return found


def test_written_twice(tmp_path: Path) -> None:
    """From the third on a checkpoint has the files of the last but one, and writes what is trained;
    each loads when the others are removed."""
    store, training = CheckpointStore(tmp_path), Training()
    found = [write(store, training, step) for step in range(6)]
    assert linked(*found) == [[], [], [0], [1], [0, 2], [1, 3]]
    assert {one.manifest.schema for one in found} == {3}
    frozen_bytes = 300 * 200 * 4 + 200 * 300 * 2
    sizes = [one.manifest.state_bytes for one in found]
    assert sizes == [sizes[5] + frozen_bytes] * 2 + [sizes[5]] * 4
    for one in found[:5]:
        assert training.is_in(store, one, one.step)
        shutil.rmtree(one.path)
    store.verify(found[5])
    assert training.is_in(store, found[5], 5)


def test_never_that_of_the_newest(tmp_path: Path) -> None:
    """Whatever is removed, so that one that is damaged leaves the one before it whole."""
    store, training = CheckpointStore(tmp_path), Training()
    zero, one, two, three = (write(store, training, step) for step in range(4))
    shutil.rmtree(two.path)
    assert linked(zero, one, three, write(store, training, 4)) == [[], [], [1], [0]]


def test_a_resumed_run_links(tmp_path: Path) -> None:
    """The next attempt links what the last ones have, also where each of them saves only once; one
    that has loaded nothing links nothing, which may be another model's."""
    training, found, strangers = Training(), list[Checkpoint](), list[Checkpoint]()
    for step in range(5):
        saver = Saver(CheckpointStore(tmp_path / "a"), retention=Retention(keep_stop=9))
        if found:
            saver.continues_from(found[-1])
        saved = saver.save_by(lambda: training.state(step), step=step, deadline_mono_s=1e12)  # noqa: B023
        assert saved.checkpoint is not None
        found.append(saved.checkpoint)
        strangers.append(write(CheckpointStore(tmp_path / "b"), training, step))
    assert linked(*found) == [[], [], [0], [1], [0, 2]]
    assert linked(*strangers) == [[]] * 5
    assert training.is_in(CheckpointStore(tmp_path / "a"), found[-1], 4)


def test_nothing_is_taken_from_beside_a_damaged_one(tmp_path: Path) -> None:
    """A run that had to pass over a checkpoint writes what is frozen anew: an older one may have
    the same damaged file."""
    store, training = CheckpointStore(tmp_path), Training()
    found = [write(store, training, step) for step in range(5)]
    with (found[0].path / FILES[1]).open("r+b") as file:  # 2 and 4 have it, too
        file.write(b"\xff" * 1000)
    again = CheckpointStore(tmp_path)
    with pytest.warns(RuntimeWarning, match="step-000000004.*continues from .*step-000000003"):
        newest = newest_good(again)
    assert newest is not None
    saver = Saver(again, retention=Retention(keep=9))
    saver.continues_from(newest)
    for step in (5, 6, 7):
        saver.save(training.state(step), step=step)
    assert linked(*found, *again.committed()[-3:])[-3:] == [[], [1, 3], [5]]
    assert training.is_in(again, again.committed()[-1], 7)


@pytest.mark.parametrize("change", ["value", "thawed", "more", "shape"])
def test_what_changes_is_written(tmp_path: Path, change: str) -> None:
    """A value that changes behind torch's back, a weight that is trained from now on, and one that
    is frozen from now on: nothing old is taken for it."""
    store, training = CheckpointStore(tmp_path), Training()
    before = [write(store, training, step) for step in (1, 2)]
    if change == "value":
        training.base["t"].data[-1, -1] += 1
    elif change == "thawed":
        training.frozen.discard(training.base["w"].data_ptr())
        training.base["w"].add_(1)
    elif change == "more":
        training.frozen.add(training.adapter.data_ptr())
    else:
        training.base["w"] = training.base["w"].view(200, 300)
        training.frozen.add(training.base["w"].data_ptr())
    after = [write(store, training, step) for step in (3, 4, 5)]
    assert linked(*before, *after) == [[], [], [], [], [] if change == "more" else [2]]
    for one in (*before, *after):
        if one in after or change == "thawed":
            store.verify(one)
    assert training.is_in(store, after[-1], 5)


@pytest.mark.parametrize("free_bytes", [10**9, 200_000], ids=["copied", "no memory"])
def test_the_state_may_change_while_a_save_runs(tmp_path: Path, free_bytes: int) -> None:
    """A periodic save has copies of what is not stored yet, and none of what is. Without memory for
    them it is written as it lies there while the training waits, as often as it is written."""
    store, training = CheckpointStore(tmp_path), Training()
    told: list[SaveEvent] = []
    machine = Room(free_bytes, 10**9, 0, "a machine")
    saver = Saver(
        store,
        retention=Retention(keep=9),
        tell=told.append,
        on_save_error="fail",
        room=lambda: machine,
    )
    saver.reserve(training.state(0))
    before = training.base["w"].clone()
    for step in range(4):
        saver.start(training.state(step), step=step)
        training.base["w"].data.zero_()  # merged for a moment
        assert saver.wait()
        training.base["w"].data.copy_(before)
    saver.close()
    found = store.committed()
    assert linked(*found) == [[], [], [0], [1]]
    assert all(training.is_in(store, one, one.step) for one in found)
    sizes = [one.state_bytes for one in told if one.kind is EventKind.SAVE_COMMITTED]
    assert sizes == [one.manifest.state_bytes for one in found]
    assert sizes[0] == sizes[1] > 4 * sizes[2]
    waited = [one.step for one in told if one.kind is EventKind.SAVE_NOT_COPIED]
    assert waited == ([] if free_bytes == 10**9 else [0, 1])


def test_checkpoints_that_are_removed(tmp_path: Path) -> None:
    """Somebody removes them: the next save writes everything. While a periodic save runs, which has
    no copy of what is frozen, that save fails, and the next one writes everything; a stop does."""
    gone = threading.Event()

    def before(_: int, name: str) -> None:
        if name == "mkdir" and gone.is_set():
            for one in tmp_path.glob("step-*"):
                shutil.rmtree(one)

    training = Training()
    store = CheckpointStore(tmp_path, storage=CountingStorage(before))
    saver = Saver(store, on_save_error="fail")

    def save(step: int, kind: str = "manual") -> None:
        saver.save(training.state(step), step=step, kind=kind)
        assert training.is_in(CheckpointStore(tmp_path), store.committed()[-1], step)

    for step in (1, 2, 3):
        save(step)
    for one in store.committed():
        shutil.rmtree(one.path)
    for step in (4, 5, 6):
        save(step)
    gone.set()
    saver.start(training.state(7), step=7)
    saver.wait()
    with pytest.raises(SaveFailed, match=r"step 7 could not be saved.* of what is frozen are gone"):
        saver.poll()
    gone.clear()
    save(8)
    save(9)
    gone.set()
    save(10, "stop")


@pytest.mark.parametrize("how", ["start", "save"])
def test_a_file_system_without_links(tmp_path: Path, how: str) -> None:
    """It is asked once; the checkpoints are whole, from copies or from memory."""

    def before(_: int, name: str) -> None:
        if name == "link":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    storage, training = CountingStorage(before), Training()
    store = CheckpointStore(tmp_path, storage=storage)
    saver = Saver(store, retention=Retention(keep=9), on_save_error="fail")
    for step in range(5):
        getattr(saver, how)(training.state(step), step=step)
        saver.wait()
    saver.close()
    assert storage.calls.count("link") == 1
    assert linked(*store.committed()) == [[]] * 5
    assert all(training.is_in(store, one, one.step) for one in store.committed())


TENSORS = (
    torch.randn(70, 500),
    torch.arange(200_001, dtype=torch.uint8)[3:],  # from the middle, an odd number of bytes
    torch.randn(5_000_000),  # several pieces
    torch.randn(300, 200).t(),
    torch.rand(99_999) > 0.5,
    torch.randn(9_000, dtype=torch.complex64),
)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda one: str(one.dtype))
def test_a_fingerprint_depends_on_every_value(tensor: torch.Tensor) -> None:
    """Both ways of making one: of the CPU, and of an accelerator, by its operators."""

    def found() -> tuple[str, int]:
        state = State(shared={"x": tensor}, own={}, frozen={tensor.data_ptr()})
        return fingerprint(divide(state, rank=0, world_size=1)), int(mixed(tensor))

    before = found()
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
    seen = {before}
    for place in (0, 1, tensor.numel() // 2, tensor.numel() - 1):
        was = flat[place].clone()
        flat[place] = ~was if tensor.dtype is torch.bool else was + 1
        seen.add(found())
        flat[place] = was
    assert found() == before
    one, two = flat[0].clone(), flat[1].clone()
    flat[0], flat[1] = two, one  # the same values elsewhere
    seen.add(found())
    assert len({cpu for cpu, _ in seen}) == len({device for _, device in seen}) >= 5
