"""Writing, finding, trusting, loading and retaining checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint.faulty import CountingStorage
from checkpoint.pipepeers import PipePeers, together
from checkpoint.states import copy_of, holds, same, state_of, write

from hydroslurm.checkpoint import folders
from hydroslurm.checkpoint.checksummed_file import BLOCK_BYTES
from hydroslurm.checkpoint.reader import Box, _range
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import CheckpointStore, Retention, State, newest_good
from hydroslurm.checkpoint.tensor_file import Chunk
from hydroslurm.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    StateMismatch,
    UnsavableState,
    UsageError,
)
from hydroslurm.training.readback import check_layout

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
    request: dict[str, Any] = {"step": 7, "epoch": 2, "kind": "stop", "meta": {"loss": 0.5}}
    done = write(CheckpointStore(tmp_path), state_of(7), **request)
    assert sorted(path.name for path in done.path.iterdir()) == sorted(FILES)
    store = CheckpointStore(tmp_path)
    (found,) = store.committed()
    assert found == done
    assert {name: getattr(found.manifest, name) for name in request} == request
    files = store.files_of(found)
    tensors = {one.key: one for part in files.parts for one in files.index(part).chunks}
    assert found.manifest.state_bytes == sum(
        math.prod(one.shape) * one.torch_dtype.itemsize for one in tensors.values()
    )
    assert holds(store, found, 7)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_tensor_comes_back(tmp_path: Path) -> None:
    """A view is saved without the memory around it; empty, scalar and strided tensors stay so, and
    dense ones keep the order of their dimensions; all types of torch that can hold values, also
    next to each other in odd numbers. A staged copy is the same."""
    big = torch.arange(1_000_000)
    odd = {
        "slice": big[10:20],
        "every_third": big[:30:3],
        "turned": torch.randn(3, 5).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "expanded": torch.ones(1).expand(4),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    }
    kinds = {}
    for kind in {one for one in vars(torch).values() if isinstance(one, torch.dtype)}:
        # torch has no tensors of all of them; those of quantized ones are refused
        with contextlib.suppress(RuntimeError, TypeError):
            if "torch.q" not in str(kind):
                kinds[str(kind)] = torch.randint(0, 2, (3 * kind.itemsize,)).byte().view(kind)
    assert len(kinds) >= 20
    store = CheckpointStore(tmp_path)
    done = write(store, State(shared={**odd, "kinds": kinds}, own={}), step=1, kind="manual")
    assert done.manifest.size_bytes < 100_000
    loaded = dict(store.load(done).shared)
    for name, tensor in loaded.pop("kinds").items():
        assert tensor.dtype == kinds[name].dtype
        assert torch.equal(tensor.view(torch.uint8), kinds[name].view(torch.uint8)), name
    wanted = {**odd, "conjugate": odd["conjugate"].resolve_conj()}
    for found in (loaded, copy_of(State(shared=odd, own={})).shared):
        assert same(dict(found), wanted)
        for name in ("turned", "channels_last"):
            assert found[name].stride() == odd[name].stride()


def test_what_is_loaded_lies_as_torch_would_have_put_it(tmp_path: Path) -> None:
    """A matrix product adds in another order where its operands lie otherwise."""
    sizes = [(18, 20), (16,), (7,), (), (64, 5), (3, 3), (1,), (128,), (5, 5), (32, 48), (0, 4)]
    made = {
        f"{dtype} {size} {n}": torch.arange(math.prod(size)).to(dtype).reshape(size)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64)
        for n, size in enumerate(sizes * 4)
    }
    store = CheckpointStore(tmp_path)
    found = store.load(write(store, State(shared=made, own={}), step=1, kind="stop")).shared
    assert all(torch.equal(found[name], one) for name, one in made.items())
    assert {one.data_ptr() % 64 for one in found.values() if one.numel() > 1} == {0}


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    """The tensors are a file of safetensors, types that it has not are bytes; the checksums are
    those of zlib, whichever library computes them."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    state = {
        "w": torch.randn(1200, 700).t(),
        "b": torch.ones(2, dtype=torch.bool),
        "h": torch.randn(7).bfloat16(),
        "z": torch.randn(4, dtype=torch.complex128),
    }
    done = write(CheckpointStore(tmp_path), State(state, {}), step=1, kind="manual")
    file = done.path / "part-00000.safetensors"
    found = safetensors.load_file(file)
    assert all(torch.equal(found[f"shared/{name}"], state[name]) for name in ("w", "b", "h"))
    assert torch.equal(found["shared/z"].view(torch.complex128), state["z"])
    data = file.read_bytes()
    blocks = [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    assert json.loads((done.path / "part-00000.json").read_bytes())["blocks"] == blocks
    whole = zlib.crc32(b"".join(crc.to_bytes(4, "big") for crc in blocks))
    assert done.manifest.files[file.name].checksum == f"{whole:08x}"


def test_two_processes_write_the_same_step(tmp_path: Path) -> None:
    """Each comes back with a checkpoint of its own, and both are whole."""
    folder = tmp_path / "c"

    def write_at_once(peers: PipePeers) -> None:
        torch.set_num_threads(1)
        peers.agree("now", None)
        done = write(CheckpointStore(folder), state_of(5), step=5, kind="periodic")
        (tmp_path / str(peers.rank)).write_text(str(done.manifest.created_epoch_ns))

    assert together(2, write_at_once) == [0, 0]
    store = CheckpointStore(folder)
    created = {int((tmp_path / rank).read_text()) for rank in "01"}
    assert created == {one.manifest.created_epoch_ns for one in store.committed()}
    assert all(holds(store, one, 5) for one in store.committed())
    names = ["step-000000005", "step-000000005.2"]
    assert sorted(path.name for path in folder.iterdir()) == names


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
        found = newest_good(CheckpointStore(tmp_path))
    assert found is not None
    assert found.step == 1
    assert len(caught) == 1
    assert str(newest.path) in str(caught[0].message)
    assert str(found.path) in str(caught[0].message)
    assert holds(store, found, 1)


def test_nothing_good_is_an_error_and_nothing_at_all_is_none(tmp_path: Path) -> None:
    """A run starts over only where there never was a checkpoint. When all newer ones are damaged,
    or have another step's name, retention keeps the old good one whatever the numbers say."""
    assert newest_good(CheckpointStore(tmp_path / "none")) is None
    store = saved(tmp_path, 1, 2, 3, 4)
    for step in (2, 3):
        (tmp_path / f"step-{step:09d}" / "shared.json").write_text("{}")
    (tmp_path / "step-000000004").rename(tmp_path / "step-000000009")
    assert "holds step 4" in str(store.problems()[tmp_path / "step-000000009"])
    CheckpointStore(tmp_path).prune(Retention(keep=1))
    with pytest.warns(RuntimeWarning, match="step-000000002"):
        found = newest_good(store)
    assert found is not None
    assert found.step == 1
    (tmp_path / "step-000000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"step-000000002.*shared\.json.*step-000000001"):
        newest_good(store)


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
        ("sssp", (2, 2, None), [1, 2, 3]),
        ("ssspppp", (2, 1, None), [2, 5, 6]),
        ("sss", (3, 0, None), [1, 2]),
        ("pmpm", (2, 2, None), [2, 3]),
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


def test_a_part_can_be_loaded(tmp_path: Path) -> None:
    """Only what is named is read, and an unknown name is answered with those there are. A rank that
    took no part in the save has nothing of its own; it gets what is shared, and asks nobody."""
    store = saved(tmp_path, 4)
    checkpoint = store.committed()[0]
    part = store.load(checkpoint, only=["model", "position"])
    assert same(dict(part.shared), {"model": state_of(4).shared["model"]})
    assert list(part.own) == ["position"]
    with pytest.raises(CheckpointMissing, match="no modle; it has model, optimizer, rng, position"):
        store.load(checkpoint, only=["modle"])
    fourth: Any = SimpleNamespace(rank=3, world_size=4)
    state = CheckpointStore(tmp_path, peers=fourth).load(checkpoint)
    assert set(state.shared) == {"model", "optimizer"}
    assert state.own == {}
    with pytest.raises(CheckpointMissing, match="nothing of rank 3: 1 ranks saved it"):
        store.load_own(checkpoint, 3)
    assert set(store.load_own(checkpoint, 0)) == {"rng", "position"}


def test_tensors_of_many_blocks(tmp_path: Path) -> None:
    """Large tensors between thousands of small ones: all come back, some of them alone. A load
    reads no file twice, and of the tensors the blocks that hold what it wants: a changed byte is
    found by whoever reads its block."""

    class Counts(Storage):
        read_bytes = 0

        def read(self, fd: int, into: memoryview, *, offset: int) -> int:
            got = super().read(fd, into, offset=offset)
            with lock:
                self.read_bytes += got
            return got

    sizes = [*range(1, 1500), 3_000_001, 5, 1_048_576, *range(1500, 1, -1)]
    state = {str(n): torch.arange(size, dtype=torch.int8) for n, size in enumerate(sizes)}
    large = [str(n) for n, size in enumerate(sizes) if size > 10_000]
    lock, disk = threading.Lock(), Counts()
    store = CheckpointStore(tmp_path, storage=disk)
    done = write(store, State({"all": state, **{n: state[n] for n in large}}, {}), step=1, kind="a")
    disk.read_bytes = 0
    assert same(dict(store.load(done).shared["all"]), state)
    manifest_bytes = (done.path / "manifest.json").stat().st_size
    assert disk.read_bytes == done.manifest.size_bytes + manifest_bytes
    file = done.path / "part-00000.safetensors"
    good = file.read_bytes()
    for at in (0, len(good) // 3, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CheckpointCorrupt, match=r"part-00000\.safetensors has checksum"):
            store.load(done)
    disk.read_bytes = 0
    assert same(store.load(done, only=[large[1]]).shared, {large[1]: state[large[1]]})
    assert (
        disk.read_bytes
        < manifest_bytes
        + sum((done.path / name).stat().st_size for name in ("shared.json", "part-00000.json"))
        + 1_048_576
        + 2 * BLOCK_BYTES
    )


def test_any_part_of_a_piece() -> None:
    """What is wanted of a tensor comes from a piece of it, whatever box either of them is."""
    whole = torch.arange(4 * 5 * 6).reshape(4, 5, 6)
    all_of_it = Box((0, 0, 0), (4, 5, 6))
    boxes = [
        all_of_it,
        *(Box((0, 0, at), (4, 5, 3)) for at in (0, 2)),
        *(Box((at, 1, 0), (2, 3, 6)) for at in (0, 1)),
        Box((1, 2, 3), (1, 1, 1)),
    ]
    for box, wanted in itertools.product(boxes, boxes):
        if (common := box.common(wanted)) is None:
            continue
        piece, memory = whole[all_of_it.slices(box)], torch.zeros(wanted.sizes, dtype=torch.int64)
        chunk, copies = Chunk("w", (4, 5, 6), "int64", *box, at_bytes=64), list[Any]()
        begin, into = _range(chunk, common, wanted, memory, copies)
        data = bytes(64) + piece.contiguous().numpy().tobytes()
        into[:] = data[begin : begin + len(into)]
        for copy in copies:
            copy()
        expected = torch.zeros_like(memory)
        expected[wanted.slices(common)] = whole[all_of_it.slices(common)]
        assert torch.equal(memory, expected), (box, wanted)


def test_mistakes_touch_nothing(tmp_path: Path) -> None:
    """What cannot be saved, a name that is a tag, meta that is no JSON and nothing to keep are
    refused before the first I/O call."""
    storage = CountingStorage()
    store = CheckpointStore(tmp_path / "c", storage=storage)
    for bad, wanted in (
        ({"sampler": {"hook": print}}, r"shared\.sampler\.hook is a "),
        ({"$tensor": 1}, "begin with"),
    ):
        with pytest.raises((UnsavableState, UsageError), match=wanted):
            write(store, State(bad, {}), step=1, kind="manual")
    with pytest.raises(UsageError, match="plain JSON"):
        write(store, State({}, {}), step=1, kind="manual", meta={"a": object()})
    for keep in ({"keep": 0}, {"keep": 1, "keep_epochs": 0}):
        with pytest.raises(UsageError, match=f"{[*keep][-1]}=0"):
            store.prune(Retention(**keep))
    assert storage.calls == []


def test_other_layouts_are_named() -> None:
    """Missing, unexpected and reshaped keys are named, the first few of them, and counted."""
    saved_state = {f"old.{n}": torch.zeros(1) for n in range(8)} | {"head": torch.zeros(3, 2)}
    target = {"new": torch.zeros(1), "head": torch.zeros(2, 2)}
    wanted = r"has 'old\.0'.* and 3 more.* lacks 'new'.*'head' is \[3, 2\] in .* and \[2, 2\] here"
    with pytest.raises(StateMismatch, match=wanted):
        check_layout("model", saved_state, target)
    check_layout("model", target, dict(target))
