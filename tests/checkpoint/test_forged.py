"""Checkpoints that somebody has forged, with checksums that are right: passed over, at once."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint.states import holds, newest_in, seal, state_of, write
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hydroslurm.checkpoint import manifest
from hydroslurm.checkpoint.catalog import look
from hydroslurm.checkpoint.manifest import FileEntry, Manifest
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore
from hydroslurm.checkpoint.tensor_file import SHARED_JSON, PartIndex
from hydroslurm.cli.checkpoint import checkpoint_app
from hydroslurm.errors import CheckpointCorrupt, CheckpointError

TENSORS, INDEX = "part-00000.safetensors", "part-00000.json"
Forge = Callable[[Path], None]


def _fifo(name: str) -> Forge:
    def forge(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return forge


def _link(name: str, target: str) -> Forge:
    def forge(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return forge


def _text(name: str, text: str) -> Forge:
    def forge(folder: Path) -> None:
        (folder / name).write_text(text)
        if name != manifest.NAME:
            seal(folder)

    return forge


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ("unpickled",)


def _pickle(name: str) -> Forge:
    def forge(folder: Path) -> None:
        (folder / name).write_bytes(pickle.dumps({"state": _Evil()}))
        seal(folder)

    return forge


def _sparse(name: str) -> Forge:
    def forge(folder: Path) -> None:
        os.truncate(folder / name, 1 << 42)

    return forge


def _says(**words: Any) -> Forge:
    return lambda folder: seal(folder, lambda body: body.update(words))


def _names(name: str, entry: object) -> Forge:
    return lambda folder: seal(folder, lambda body: body["files"].update({name: entry}))


GOOD = {"size_bytes": 0, "checksum": "00000000"}
DEEP = "[" * 100_000
OUTSIDE = {
    "path outside": _names("../../x", GOOD),
    "folder above": _names("..", GOOD),
    "absolute path": _names("/etc/passwd", GOOD),
    "two folders inside": _names("000/001/part-00000.json", GOOD),
    "above a folder inside": _names("000/../../x", GOOD),
    "up from a folder inside": _names("000/..", GOOD),
    "folder with another name": _names("x/part-00000.json", GOOD),
    "folder inside without a file": _names("000/", GOOD),
    "this very folder": _names(".", GOOD),
    "no name": _names("", GOOD),
    "name with nul": _names("a\0b", GOOD),
}
"""Files that do not lie in the folder of the checkpoint."""
FOUND_BY_LS = {
    "fifo as manifest": _fifo(manifest.NAME),
    "device as manifest": _link(manifest.NAME, "/dev/zero"),
    "link as manifest": _link(manifest.NAME, "/etc/hostname"),
    "fifo as tensors": _fifo(TENSORS),
    "device as tensors": _link(TENSORS, "/dev/zero"),
    "fifo as index": _fifo(INDEX),
    "endless manifest": _sparse(manifest.NAME),
    "endless tensors": _sparse(TENSORS),
    "deep manifest": _text(manifest.NAME, DEEP),
    "deep meta": _text(manifest.NAME, '{"meta":' * 5000 + "0" + "}" * 5000),
    "number of 5000 digits": _says(step=0, save_s=0.0, epoch=10**4000),
    "huge size": _names("x", {"size_bytes": 10**30, "checksum": "0"}),
    "negative size": _names("x", {"size_bytes": -1, "checksum": "0"}),
    "size as text": _names("x", {"size_bytes": "1", "checksum": "0"}),
    "endless size": _says(state_bytes=float("inf")),
    "text for a step": _says(step="3"),
    "true for a step": _says(step=True),
    "list for files": _says(files=[]),
    "nothing for meta": _says(meta=None),
    "negative time": _says(created_epoch_ns=-(10**30)),
    "endless time": _says(save_s=float("nan")),
    **OUTSIDE,
}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Steps 1 and 2 are good, and 3 is there to be forged."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        write(store, state_of(step), step=step, kind="periodic")
    return store


def _third(store: CheckpointStore) -> Path:
    return store.directory / "step-000000003"


def _call(*arguments: object) -> str:
    done = CliRunner().invoke(checkpoint_app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.output


@pytest.mark.parametrize("how", FOUND_BY_LS)
def test_forged(how: str, store: CheckpointStore, tmp_path: Path) -> None:
    """``ls`` and ``verify`` have a line for each, the others are shown as they are; the newest good
    one is taken with one warning, and exported."""
    FOUND_BY_LS[how](_third(store))
    rows = json.loads(_call("ls", "--json", store.directory))
    # everybody can write /dev/zero: that is seen before what it is
    third = "untrusted" if how == "device as manifest" else "torn"
    assert [row["state"] for row in rows] == ["whole", "whole", third], rows
    assert ("lie in its folder" in rows[2]["reason"]) == (how in OUTSIDE)
    assert len(_call("ls", store.directory).splitlines()) == 4
    assert "3 checkpoints, 1 of them cannot be loaded" in _call("verify", store.directory)
    with pytest.warns(RuntimeWarning, match="continues from .*step-000000002"):
        found = newest_in(CheckpointStore(store.directory))
    assert found is not None
    assert holds(store, found, 2)
    with pytest.warns(RuntimeWarning, match="continues from"):
        _call("export", store.directory, "--out", tmp_path / "model.pt")
    assert (tmp_path / "model.pt").is_file()


def _json(name: str, change: Callable[[Any], object]) -> Forge:
    """Change what a file of JSON says."""

    def forge(folder: Path) -> None:
        body = json.loads((folder / name).read_text())
        change(body)
        (folder / name).write_text(json.dumps(body))
        seal(folder)

    return forge


def _index(change: Callable[[Any], object]) -> Forge:
    return _json(INDEX, change)


def _chunk(place: int, value: object) -> Forge:
    """Change one word of what the index says about every piece."""

    def change(body: Any) -> None:
        for chunk in body["chunks"]:
            chunk[place] = value

    return _index(change)


KEY, SHAPE, DTYPE, OFFSETS, SIZES, AT = range(6)
WEIGHT = "shared/model.weight"


def _shaped(*shape: int) -> Forge:
    """Claim that a tensor is larger, in both places that say so."""

    def forge(folder: Path) -> None:
        def everywhere(body: Any) -> None:
            for chunk in body["chunks"]:
                if chunk[KEY] == WEIGHT:
                    chunk[SHAPE:AT] = [shape, "float32", [0] * len(shape), shape]

        _index(everywhere)(folder)
        _json(SHARED_JSON, lambda body: body["tensors"].update({WEIGHT: [shape, "float32", 0]}))(
            folder
        )

    return forge


def _state(state: object) -> Forge:
    return _json(SHARED_JSON, lambda body: body.update(state=state))


def _said_of_weight(*said: object) -> Forge:
    return _json(SHARED_JSON, lambda body: body["tensors"].update({WEIGHT: said}))


FORGED_INSIDE = {
    "shape of 10**18": _shaped(10**9, 10**9),
    "shape of a hundred gigabytes": _shaped(25, 10**9),
    "shape of the index only": _chunk(SHAPE, [10**9, 10**9]),
    "shape of the state only": _said_of_weight([10**9, 10**9], "float32", 0),
    "all tensors in one place": _chunk(AT, 4096),
    "tensors before the file": _chunk(AT, -1),
    "tensors beyond the end": _chunk(AT, 10**15),
    "tensors at an odd byte": _chunk(AT, 4097),
    "text for an offset": _chunk(AT, "0"),
    "piece outside of its tensor": _chunk(OFFSETS, [10**6, 0]),
    "piece of other dimensions": _chunk(SIZES, [1]),
    "number for a key": _chunk(KEY, 7),
    "another key": _chunk(KEY, "shared/model.weigh"),
    "type that is none": _chunk(DTYPE, "Tensor"),
    "type of another size": _chunk(DTYPE, "float64"),
    "list for a type": _said_of_weight([48, 48], [], 0),
    "text for a writer": _said_of_weight([48, 48], "float32", "0"),
    "no tensors": _index(lambda body: body["chunks"].clear()),
    "no tensors in the state": _json(SHARED_JSON, lambda body: body["tensors"].clear()),
    "number for the pieces": _index(lambda body: body.update(chunks=7)),
    "other blocks": _index(lambda body: body.update(blocks=[1])),
    "more blocks": _index(lambda body: body["blocks"].append(1)),
    "huge block": _index(lambda body: body.update(blocks=[10**30])),
    "no blocks": _index(lambda body: body.update(blocks=None)),
    "index of another rank": _index(lambda body: body.update(rank=1)),
    "list for its own state": _index(lambda body: body.update(own=[])),
    "deep index": _text(INDEX, DEEP),
    "deep state": _text(SHARED_JSON, DEEP),
    "state of another kind": _text(SHARED_JSON, "[1]"),
    "unknown tag": _state({"model": {"$import": "os"}}),
    "strides over a petabyte": _state(
        {"model": {"$tensor": WEIGHT, "stride": [1000000000000000, 1]}}
    ),
    "tensor named by a list": _state({"model": {"$tensor": ["a"]}}),
    "empty tensor of endless steps": _said_of_weight([0, 1 << 62, 1 << 62], "float32", 0),
    "array of another size": _state({"model": {"$ndarray": ["<U7", [3], {"$tensor": WEIGHT}]}}),
    "set of lists": _state({"model": {"$set": [[1]]}}),
    "pickle as state": _pickle(SHARED_JSON),
    "pickle as index": _pickle(INDEX),
    "pickle as tensors": _pickle(TENSORS),
}


@pytest.mark.parametrize("how", FORGED_INSIDE)
def test_forged_inside(how: str, store: CheckpointStore) -> None:
    """What a load refuses, before any memory is taken for it, verifying refuses, too."""
    FORGED_INSIDE[how](_third(store))
    third = next(one for one in store.committed() if one.step == 3)
    for read in (store.load, store.verify):
        with pytest.raises(CheckpointCorrupt):
            read(third)


_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
_ONE = Manifest(1, 0, "stop", 5, 0.1, 4, {"shared.json": FileEntry(2, "a3bb189e")})


@given(name=st.sampled_from(sorted(json.loads(_ONE.to_json()))), value=_ANY)
def test_any_value_in_any_place_of_a_manifest(name: str, value: Any) -> None:
    """A manifest with a right checksum is one, typed, or CheckpointError."""
    body = json.loads(_ONE.to_json())
    del body["checksum"]
    body[name] = value
    text = json.dumps(body, indent=1) + "\n"
    body["checksum"] = manifest.checksum(text.encode())
    try:
        found = Manifest.from_json(json.dumps(body, indent=1) + "\n", where=Path("m"))
    except CheckpointError:
        return
    assert found.size_bytes >= 0
    assert min(found.step, found.epoch, found.created_epoch_ns) >= 0
    assert found.kind.isprintable() or found.kind
    assert all(Path(one).name == one for one in found.files)


@given(
    name=st.sampled_from(["rank", "own", "chunks", "blocks"]),
    value=_ANY | st.lists(st.lists(_ANY, min_size=6, max_size=6), max_size=2),
)
def test_any_value_in_any_place_of_a_part(name: str, value: Any) -> None:
    """The index of one rank's part is one, typed, or CheckpointCorrupt."""
    body = {"rank": 0, "own": {}, "chunks": [], "blocks": [0], name: value}
    entry = FileEntry(5, "00000000")
    try:
        found = PartIndex.from_json(
            json.dumps(body).encode(), where=Path("p"), rank=0, tensors=entry
        )
    except CheckpointCorrupt:
        return
    assert sum(chunk.size_bytes for chunk in found.chunks) <= 5
    assert found.blocks == (0,)


def test_a_folder_of_anything(tmp_path: Path) -> None:
    """Files, FIFOs and links that are named like checkpoints, and names with too many digits, are
    problems or nothing."""
    (tmp_path / "step-000000001").write_text("x")
    os.mkfifo(tmp_path / "step-000000002")
    (tmp_path / "step-000000003").symlink_to("/dev/zero")
    (tmp_path / f"step-{'9' * 240}").mkdir()
    (tmp_path / "step-٠٠٠٠٠٠٠٠٤").mkdir()
    found = look(tmp_path, storage=Storage())
    assert [one.key for one in found] == [(1, 1), (2, 1), (3, 1)]
    assert not any(isinstance(one, Checkpoint) for one in found)


def test_good_ones_are_still_good(store: CheckpointStore) -> None:
    """Nothing of this refuses what was written honestly."""
    for one in store.committed():
        store.verify(one)
        assert holds(store, one, one.step)
