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
from checkpoint.states import holds, seal, state_of, write
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hydroslurm.checkpoint import manifest
from hydroslurm.checkpoint.checksummed_file import FileEntry
from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, newest_good
from hydroslurm.checkpoint.tensor_file import SHARED_JSON, PartIndex
from hydroslurm.cli.checkpoint import checkpoint_app
from hydroslurm.errors import CheckpointCorrupt, CheckpointError

TENSORS, INDEX = "part-00000.safetensors", "part-00000.json"
Forge = Callable[[Path], None]


def _instead(name: str, make: Callable[[Path], object]) -> Forge:
    """Something else in the place of a file."""

    def forge(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return forge


def _to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


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


def _says(**words: Any) -> Forge:
    return lambda folder: seal(folder, lambda body: body.update(words))


def _names(name: str, entry: object) -> Forge:
    return lambda folder: seal(folder, lambda body: body["files"].update({name: entry}))


GOOD = {"size_bytes": 0, "checksum": "00000000"}
DEEP = "[" * 100_000
OUTSIDE = {
    "path outside": _names("../../x", GOOD),
    "absolute path": _names("/etc/passwd", GOOD),
    "up from a folder inside": _names("000/..", GOOD),
    "folder with another name": _names("x/part-00000.json", GOOD),
    "this very folder": _names(".", GOOD),
    "no name": _names("", GOOD),
}
"""Files that do not lie in the folder of the checkpoint."""
FOUND_BY_LS = {
    "fifo as manifest": _instead(manifest.NAME, os.mkfifo),
    "device as manifest": _instead(manifest.NAME, _to_zero),
    "fifo as tensors": _instead(TENSORS, os.mkfifo),
    "device as tensors": _instead(TENSORS, _to_zero),
    "endless manifest": lambda folder: os.truncate(folder / manifest.NAME, 1 << 42),
    "endless tensors": lambda folder: os.truncate(folder / TENSORS, 1 << 42),
    "deep manifest": _text(manifest.NAME, DEEP),
    "deep meta": _text(manifest.NAME, '{"meta":' * 5000 + "0" + "}" * 5000),
    "number of 5000 digits": _says(step=0, save_s=0.0, epoch=10**4000),
    "huge size": _names("x", {"size_bytes": 10**30, "checksum": "0"}),
    "size as text": _names("x", {"size_bytes": "1", "checksum": "0"}),
    "text for a step": _says(step="3"),
    "nothing for meta": _says(meta=None),
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
        found = newest_good(CheckpointStore(store.directory))
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
        _text(name, json.dumps(body))(folder)

    return forge


def _index(change: Callable[[Any], object]) -> Forge:
    return _json(INDEX, change)


def _chunk(place: int, value: object) -> Forge:
    """Change one word of what the index says about every piece."""
    return _index(lambda body: [chunk.__setitem__(place, value) for chunk in body["chunks"]])


KEY, SHAPE, DTYPE, OFFSETS, SIZES, AT = range(6)
WEIGHT = "shared/model.weight"


def _shaped(*shape: int) -> Forge:
    """Claim that a tensor is larger, in both places that say so."""

    def everywhere(body: Any) -> None:
        for chunk in body["chunks"]:
            if chunk[KEY] == WEIGHT:
                chunk[SHAPE:AT] = [shape, "float32", [0] * len(shape), shape]

    def forge(folder: Path) -> None:
        _index(everywhere)(folder)
        _said_of_weight(shape, "float32", 0)(folder)

    return forge


def _state(state: object) -> Forge:
    return _json(SHARED_JSON, lambda body: body.update(state=state))


def _said_of_weight(*said: object) -> Forge:
    return _json(SHARED_JSON, lambda body: body["tensors"].update({WEIGHT: said}))


FORGED_INSIDE = {
    "shape of 10**18": _shaped(10**9, 10**9),
    "shape of a hundred gigabytes": _shaped(25, 10**9),
    "shape of the index only": _chunk(SHAPE, [10**9, 10**9]),
    "all tensors in one place": _chunk(AT, 4096),
    "tensors beyond the end": _chunk(AT, 10**15),
    "tensors at an odd byte": _chunk(AT, 4097),
    "piece outside of its tensor": _chunk(OFFSETS, [10**6, 0]),
    "piece of other dimensions": _chunk(SIZES, [1]),
    "another key": _chunk(KEY, "shared/model.weigh"),
    "type that is none": _chunk(DTYPE, "Tensor"),
    "type of another size": _chunk(DTYPE, "float64"),
    "no tensors": _index(lambda body: body["chunks"].clear()),
    "other blocks": _index(lambda body: body.update(blocks=[1])),
    "huge block": _index(lambda body: body.update(blocks=[10**30])),
    "index of another rank": _index(lambda body: body.update(rank=1)),
    "deep index": _text(INDEX, DEEP),
    "deep state": _text(SHARED_JSON, DEEP),
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
    found = CheckpointStore(tmp_path, storage=Storage()).look()
    assert [one.key for one in found] == [(1, 1), (2, 1), (3, 1)]
    assert not any(isinstance(one, Checkpoint) for one in found)
