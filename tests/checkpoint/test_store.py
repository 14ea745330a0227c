"""Writing, finding, trusting, loading and retaining checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import re
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.faulty import CountingStorage
from checkpoint.pipepeers import Lonely
from checkpoint.states import copy_of, holds, newest_in, same, state_of, write

from hydroslurm.checkpoint import checksummed_file, folders, layout
from hydroslurm.checkpoint.checksummed_file import BLOCK_BYTES
from hydroslurm.checkpoint.host_memory import packed
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import CheckpointStore, Retention, State
from hydroslurm.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    SaveAbandoned,
    SaveFailed,
    StateMismatch,
    UnsavableState,
    UsageError,
)

FILES = ("manifest.json", "part-00000.json", "part-00000.safetensors", "shared.json")


def saved(folder: Path, *steps: int, kind: str = "periodic") -> CheckpointStore:
    store = CheckpointStore(folder)
    for step in steps:
        write(store, state_of(step), step=step, kind=kind)
    return store


def steps_of(store: CheckpointStore) -> list[int]:
    return [one.step for one in store.committed()]


def test_a_state_comes_back(tmp_path: Path) -> None:
    """What was written is loaded bit for bit, by another store, with what the manifest says."""
    done = write(
        CheckpointStore(tmp_path), state_of(7), step=7, epoch=2, kind="stop", meta={"loss": 0.5}
    )
    assert sorted(path.name for path in done.path.iterdir()) == sorted(FILES)
    (found,) = CheckpointStore(tmp_path).committed()
    assert found == done
    assert (found.step, found.epoch, found.kind) == (7, 2, "stop")
    assert found.manifest.meta == {"loss": 0.5}
    files = CheckpointStore(tmp_path).files_of(found)
    tensors = {one.key: one for part in files.parts for one in files.index(part).chunks}
    assert found.manifest.state_bytes == sum(
        math.prod(one.shape) * one.torch_dtype.itemsize for one in tensors.values()
    )
    assert holds(CheckpointStore(tmp_path), found, 7)


def test_views_and_odd_tensors_come_back(tmp_path: Path) -> None:
    """A view is saved without the memory around it; empty, scalar and strided tensors stay so, and
    dense ones keep the order of their dimensions. A staged copy is the same."""
    big = torch.arange(1_000_000)
    odd = {
        "slice": big[10:20],
        "every_third": big[:30:3],
        "turned": torch.randn(3, 5).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "expanded": torch.ones(1).expand(4),
        "half": torch.randn(3).bfloat16(),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    }
    store = CheckpointStore(tmp_path)
    done = write(store, State(shared=odd, own={}), step=1, kind="manual")
    assert done.manifest.size_bytes < 100_000
    wanted = {**odd, "conjugate": odd["conjugate"].resolve_conj()}
    for found in (store.load(done).shared, copy_of(State(shared=odd, own={})).shared):
        assert same(dict(found), wanted)
        for name in ("turned", "channels_last"):
            assert found[name].stride() == odd[name].stride()


def test_small_tensors_are_one_piece() -> None:
    """A file is written in few calls, however many tensors it has."""
    tensors = [torch.full((100,), number) for number in range(1000)]
    assert [len(piece) for piece in packed(tensors)] == [1000 * 100 * 8]


def test_what_is_loaded_lies_as_torch_would_have_put_it(tmp_path: Path) -> None:
    """A matrix product adds in another order where its operands lie otherwise."""
    sizes = [(18, 20), (16,), (7,), (), (64, 5), (3, 3), (1,), (128,), (5, 5), (32, 48), (0, 4)]
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64)
    made = {
        f"{dtype} {size} {n}": torch.arange(math.prod(size)).to(dtype).reshape(size)
        for dtype in dtypes
        for n, size in enumerate(sizes * 4)
    }
    store = CheckpointStore(tmp_path)
    found = store.load(write(store, State(shared=made, own={}), step=1, kind="stop")).shared
    assert all(torch.equal(found[name], one) for name, one in made.items())
    assert {one.data_ptr() % 64 for one in found.values() if one.numel() > 1} == {0}


def test_a_step_is_saved_again(tmp_path: Path) -> None:
    """The new checkpoint is the newer one; the one before stays, whole or damaged."""
    store = saved(tmp_path, 3)
    (store.committed()[0].path / "shared.json").write_text("{}")
    again = write(CheckpointStore(tmp_path), state_of(5), step=3, kind="stop")
    assert again.kind == "stop"
    assert [one.path.name for one in store.committed()] == ["step-000000003", "step-000000003.2"]
    newest = newest_in(store)
    assert newest == again
    assert holds(store, again, 5)


def _write_at_once(folder: str, barrier: Any, results: Any) -> None:
    torch.set_num_threads(1)
    barrier.wait()
    done = write(CheckpointStore(Path(folder)), state_of(5), step=5, kind="periodic")
    results.put(done.manifest.created_epoch_ns)


def test_two_processes_write_the_same_step(tmp_path: Path) -> None:
    """Each comes back with a checkpoint of its own, and both are whole."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (str(tmp_path), barrier, results)
    writers = [context.Process(target=_write_at_once, args=arguments) for _ in range(2)]
    for writer in writers:
        writer.start()
    created = {results.get(timeout=100) for _ in writers}
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    store = CheckpointStore(tmp_path)
    assert created == {one.manifest.created_epoch_ns for one in store.committed()}
    assert len(created) == 2
    assert all(holds(store, one, 5) for one in store.committed())
    names = ["step-000000005", "step-000000005.2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "grown"])
def test_damage_is_found_and_passed_over(tmp_path: Path, name: str, damage: str) -> None:
    """A changed bit, a lost end, a lost file or more bytes in any file: verify names it, and the
    newest good one is the one before, with one warning that names both."""
    store = saved(tmp_path, 1, 2)
    newest = store.committed()[-1]
    file = newest.path / name
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1 << (len(name) % 8) if damage == "flip" else 0
        file.write_bytes(data[:-1] if damage == "cut" else data + b"x" * (damage == "grown"))
    with pytest.raises(CheckpointCorrupt, match=re.escape(name)):
        store.verify(newest)
    with pytest.raises(CheckpointCorrupt):
        store.load(newest)
    with pytest.warns(RuntimeWarning, match="continues from") as caught:
        found = newest_in(CheckpointStore(tmp_path))
    assert found is not None
    assert found.step == 1
    assert len(caught) == 1
    assert str(newest.path) in str(caught[0].message)
    assert str(found.path) in str(caught[0].message)
    assert holds(store, found, 1)


def test_nothing_good_is_an_error_and_nothing_at_all_is_none(tmp_path: Path) -> None:
    """A run starts over only where there never was a checkpoint."""
    assert newest_in(CheckpointStore(tmp_path / "none")) is None
    store = saved(tmp_path, 1, 2)
    (tmp_path / "step-000000001" / "manifest.json").unlink()
    (tmp_path / "step-000000002" / "shared.json").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"step-000000002.*shared\.json.*step-000000001"):
        newest_in(store)


def test_only_dead_leftovers_are_removed(tmp_path: Path) -> None:
    """A save of this process or of another node may be going on; one of a dead process is not."""
    store = saved(tmp_path, 1)
    mine = folders.temporary(folders.of_step(tmp_path, 2))
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    dead = mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{gone}."))
    elsewhere = mine.with_name(mine.name.replace(folders.place(), "00000000"))
    old = mine.with_name(mine.name.replace(folders.place(), "00000001"))
    foreign = tmp_path / ".tmp-of-somebody"
    for path in (mine, dead, elsewhere, old, foreign):
        path.mkdir()
    (old / "part").touch()
    for path in (old / "part", old):
        os.utime(path, (1e9, 1e9))
    store.prune(Retention(keep=1))
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == {
        mine.name,
        elsewhere.name,
        foreign.name,
    }


@pytest.mark.parametrize(
    ("kinds", "keep", "left"),
    [
        ("pppp", (2, 2, None), [2, 3]),
        ("pppp", (1, 2, None), [2, 3]),
        ("psps", (2, 2, None), [0, 1, 2, 3]),
        ("sssp", (2, 2, None), [1, 2, 3]),
        ("ssspppp", (2, 1, None), [2, 5, 6]),
        ("sss", (3, 0, None), [1, 2]),
        ("pmpm", (2, 2, None), [2, 3]),
        ("epeppep", (1, 2, None), [0, 2, 5, 6]),
        ("epeppep", (1, 2, 2), [2, 5, 6]),
        ("epeppep", (1, 2, 1), [5, 6]),
    ],
)
def test_retention(
    tmp_path: Path, kinds: str, keep: tuple[int, int, int | None], left: list[int]
) -> None:
    """Stops and epochs are counted apart from the others, and two are kept in any case."""
    names = {"p": "periodic", "s": "stop", "m": "manual", "e": "epoch"}
    store = CheckpointStore(tmp_path)
    for step, kind in enumerate(kinds):
        write(store, State({"a": step}, {}), step=step, kind=names[kind])
    removed = store.prune(Retention(keep=keep[0], keep_stop=keep[1], keep_epochs=keep[2]))
    assert steps_of(store) == left
    assert [folders.key_of(path.name)[0] for path in removed] == [
        step for step in range(len(kinds)) if step not in left
    ]


def test_the_end_of_an_epoch_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    """A periodic checkpoint of the same step does not stand in for it, nor it for a stop's; but the
    same epoch is not written twice, in this attempt or the next one."""
    store = CheckpointStore(tmp_path)
    saver = Saver(store, retention=Retention(keep=9))
    for n, kind in enumerate(("periodic", "epoch", "epoch")):
        saver.save(State({"a": n}, {}), step=7, epoch=int(n > 0), kind=kind)
    later = Saver(store, retention=Retention(keep=9))
    later.continues_from(store.committed()[-1])
    for n, kind in enumerate(("epoch", "stop"), 3):
        later.save(State({"a": n}, {}), step=7, epoch=1, kind=kind)
    assert [(one.kind, one.key) for one in store.committed()] == [
        ("periodic", (7, 1)),
        ("epoch", (7, 2)),
        ("stop", (7, 3)),
    ]


def test_the_newest_good_one_is_not_retired(tmp_path: Path) -> None:
    """When all newer ones are damaged, the old good one stays whatever the numbers say."""
    saved(tmp_path, 1, 2, 3)
    for step in (2, 3):
        (tmp_path / f"step-{step:09d}" / "shared.json").write_text("{}")
    store = CheckpointStore(tmp_path)
    store.prune(Retention(keep=1))
    assert 1 in steps_of(store)
    with pytest.warns(RuntimeWarning, match="step-000000003"):
        found = newest_in(store)
    assert found is not None
    assert found.step == 1


def test_a_part_can_be_loaded(tmp_path: Path) -> None:
    """Only what is named is read, and an unknown name is answered with those there are."""
    store = saved(tmp_path, 4)
    checkpoint = store.committed()[0]
    part = store.load(checkpoint, only=["model", "position"])
    assert same(dict(part.shared), {"model": state_of(4).shared["model"]})
    assert list(part.own) == ["position"]
    with pytest.raises(CheckpointMissing, match="no modle; it has model, optimizer, rng, position"):
        store.load(checkpoint, only=["modle"])


def test_a_save_can_be_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting ``cancel`` half-way ends the save, and nothing of it is left."""
    monkeypatch.setattr(checksummed_file, "CHUNK_BYTES", 1024)
    saved(tmp_path, 1)
    cancel = threading.Event()

    def before(n: int, name: str) -> None:
        if name == "write":
            cancel.set()

    store = CheckpointStore(tmp_path, storage=CountingStorage(before))
    with pytest.raises(SaveAbandoned, match="step-000000002"):
        write(store, state_of(2), step=2, kind="stop", cancel=cancel)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def test_an_unsavable_state_touches_nothing(tmp_path: Path) -> None:
    """What cannot be saved is refused before the first I/O call."""
    storage = CountingStorage()
    with pytest.raises(UnsavableState, match=r"shared\.sampler\.hook is a "):
        write(
            CheckpointStore(tmp_path / "c", storage=storage),
            State({"sampler": {"hook": print}}, {}),
            step=1,
            kind="manual",
        )
    assert storage.calls == []


def test_safetensors_reads_it_too(tmp_path: Path) -> None:
    """Any program that opens .safetensors can take the tensors: the format is not ours alone. Types
    that it has not are bytes."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    state = {
        "w": torch.randn(3, 5).t(),
        "b": torch.ones(2, dtype=torch.bool),
        "h": torch.randn(7).bfloat16(),
        "z": torch.randn(4, dtype=torch.complex128),
    }
    path = write(CheckpointStore(tmp_path), State(state, {}), step=1, kind="manual").path
    found = safetensors.load_file(path / "part-00000.safetensors")
    assert all(torch.equal(found[f"shared/{name}"], state[name]) for name in ("w", "b", "h"))
    assert torch.equal(found["shared/z"].view(torch.complex128), state["z"])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_type_comes_back(tmp_path: Path) -> None:
    """All types of torch that can hold values, also next to each other in odd numbers."""
    kinds = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    tensors = {}
    for kind in sorted(kinds, key=str):
        if "torch.q" in str(kind):  # quantized: their tensors are refused
            continue
        with contextlib.suppress(RuntimeError, TypeError):  # torch has no tensors of all of them
            tensors[str(kind)] = torch.randint(0, 2, (3 * kind.itemsize,)).byte().view(kind)
    assert len(tensors) >= 20
    store = CheckpointStore(tmp_path)
    done = write(store, State(tensors, {}), step=1, kind="manual")
    loaded = store.load(done).shared
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_tensors_of_many_blocks(tmp_path: Path) -> None:
    """Large tensors between thousands of small ones: all come back, some of them alone, and a
    changed byte anywhere is found by whoever reads its block, and named."""
    sizes = [*range(1, 1500), 3_000_001, 5, 1_048_576, *range(1500, 1, -1)]
    state = {str(n): torch.arange(size, dtype=torch.int8) for n, size in enumerate(sizes)}
    large = [str(n) for n, size in enumerate(sizes) if size > 10_000]
    store = CheckpointStore(tmp_path)
    done = write(store, State({"all": state, **{n: state[n] for n in large}}, {}), step=1, kind="a")
    assert same(dict(store.load(done).shared["all"]), state)
    file = done.path / "part-00000.safetensors"
    good = file.read_bytes()
    for at in (0, len(good) // 3, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CheckpointCorrupt, match=r"part-00000\.safetensors has checksum"):
            store.load(done)
    assert same(store.load(done, only=[large[0]]).shared, {large[0]: state[large[0]]})


def test_checksums_are_those_of_zlib(tmp_path: Path) -> None:
    """The algorithm that a manifest names is zlib's, whichever library computes it: any program can
    verify a checkpoint."""
    state = {name: torch.randn(700_000) for name in "ab"}
    done = write(CheckpointStore(tmp_path), State(state, {}), step=1, kind="manual")
    data = (done.path / "part-00000.safetensors").read_bytes()
    blocks = [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    assert json.loads((done.path / "part-00000.json").read_bytes())["blocks"] == blocks
    whole = zlib.crc32(b"".join(crc.to_bytes(4, "big") for crc in blocks))
    assert done.manifest.files["part-00000.safetensors"].checksum == f"{whole:08x}"


def test_reads_every_byte_once(tmp_path: Path) -> None:
    """A load reads no file twice, and of the tensors the blocks that hold what it wants."""
    state = {name: torch.randn(3_000_000) for name in "abc"}
    done = write(CheckpointStore(tmp_path), State(state, {}), step=1, kind="manual")
    read = ReadBytes()
    CheckpointStore(tmp_path, storage=read).load(done)
    manifest_bytes = (done.path / "manifest.json").stat().st_size
    assert read.size_bytes == done.manifest.size_bytes + manifest_bytes
    read.size_bytes = 0
    CheckpointStore(tmp_path, storage=read).load(done, only=["b"])
    assert read.size_bytes < done.manifest.size_bytes / 3 + 2 * BLOCK_BYTES + 10_000


class ReadBytes(Storage):
    """Counts what is read."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._lock = threading.Lock()

    def read(self, fd: int, into: Sequence[memoryview], *, offset: int) -> int:
        got = super().read(fd, into, offset=offset)
        with self._lock:
            self.size_bytes += got
        return got


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Something else in the place of the folder is a clear error that names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveFailed, match=r"step 1 could not be saved to .*file"):
        saved(tmp_path / "file", 1)


def test_wrong_arguments(tmp_path: Path) -> None:
    """meta that is no JSON, a name that is a tag, nothing to keep: all before any writing."""
    store = CheckpointStore(tmp_path / "c")
    with pytest.raises(UsageError, match="keep=0"):
        store.prune(Retention(keep=0))
    with pytest.raises(UsageError, match="keep_epochs=0"):
        store.prune(Retention(keep=1, keep_epochs=0))
    with pytest.raises(UsageError, match="plain JSON"):
        write(store, State({}, {}), step=1, kind="manual", meta={"a": object()})
    with pytest.raises(UsageError, match="begin with"):
        write(store, State({"$tensor": 1}, {}), step=1, kind="manual")
    assert not store.directory.exists()


def test_a_rank_that_took_no_part_has_nothing_of_its_own(tmp_path: Path) -> None:
    """A run that comes back with more ranks gets what is shared."""
    checkpoint = saved(tmp_path, 1).committed()[0]
    state = CheckpointStore(tmp_path, peers=Lonely(rank=3, world_size=4)).load(checkpoint)
    assert set(state.shared) == {"model", "optimizer"}
    assert state.own == {}
    with pytest.raises(CheckpointMissing, match="nothing of rank 3: 1 ranks saved it"):
        CheckpointStore(tmp_path).load_own(checkpoint, 3)
    assert set(CheckpointStore(tmp_path).load_own(checkpoint, 0)) == {"rng", "position"}


def test_a_renamed_folder_is_a_problem(tmp_path: Path) -> None:
    """A folder that was given another step's name is not taken for that step."""
    store = saved(tmp_path, 1)
    (tmp_path / "step-000000001").rename(tmp_path / "step-000000009")
    assert store.committed() == ()
    assert "holds step 1" in str(store.problems()[tmp_path / "step-000000009"])


def test_other_layouts_are_named() -> None:
    """Missing, unexpected and reshaped keys are named, the first few of them, and counted."""
    saved_state = {f"old.{n}": torch.zeros(1) for n in range(8)} | {"head": torch.zeros(3, 2)}
    target = {"new": torch.zeros(1), "head": torch.zeros(2, 2)}
    with pytest.raises(StateMismatch) as caught:
        layout.check_layout("model", saved_state, target)
    message = str(caught.value)
    assert "only the checkpoint has 'old.0'" in message
    assert "and 3 more" in message
    assert "the checkpoint lacks 'new'" in message
    assert "'head' is [3, 2] in the checkpoint and [2, 2] here" in message
    layout.check_layout("model", target, dict(target))
