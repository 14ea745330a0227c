"""Checkpoints that somebody has forged, with checksums that are right: passed over, at once."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.states import holds, newest_in, state_of
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hydroslurm.checkpoint import manifest
from hydroslurm.checkpoint.catalog import look
from hydroslurm.checkpoint.manifest import FileEntry, Manifest
from hydroslurm.checkpoint.reader import read_metadata
from hydroslurm.checkpoint.storage import LocalStorage
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore
from hydroslurm.checkpoint.writer import METADATA, SHARED_JSON, PartIndex
from hydroslurm.cli.checkpoint import checkpoint_app
from hydroslurm.errors import CheckpointCorrupt, CheckpointError

TENSORS = "__0_0.distcp"
Forge = Callable[[Path], None]


def _seal(folder: Path, change: Callable[[dict[str, Any]], object] = dict.items) -> None:
    """Write a manifest that fits to the files, and to itself."""
    body = json.loads((folder / manifest.NAME).read_text())
    del body["checksum"]
    for name in body["files"]:
        if (folder / name).is_file() and not (folder / name).is_symlink():
            data = (folder / name).read_bytes()
            body["files"][name] = {
                "size_bytes": len(data),
                "checksum": manifest.checksum(data),
            }
    change(body)
    text = json.dumps(body, indent=1) + "\n"
    body["checksum"] = manifest.checksum(text.encode())
    (folder / manifest.NAME).write_text(json.dumps(body, indent=1) + "\n")


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
            _seal(folder)

    return forge


def _sparse(name: str) -> Forge:
    def forge(folder: Path) -> None:
        os.truncate(folder / name, 1 << 42)

    return forge


def _says(**words: Any) -> Forge:
    return lambda folder: _seal(folder, lambda body: body.update(words))


def _names(name: str, entry: object) -> Forge:
    return lambda folder: _seal(folder, lambda body: body["files"].update({name: entry}))


GOOD = {"size_bytes": 0, "checksum": "00000000"}
DEEP = "[" * 100_000
FOUND_BY_LS = {
    "fifo as manifest": _fifo(manifest.NAME),
    "device as manifest": _link(manifest.NAME, "/dev/zero"),
    "fifo as tensors": _fifo(TENSORS),
    "device as tensors": _link(TENSORS, "/dev/zero"),
    "fifo as index": _fifo(METADATA),
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
    "path outside": _names("../../x", GOOD),
    "folder above": _names("..", GOOD),
    "absolute path": _names("/etc/passwd", GOOD),
    "no name": _names("", GOOD),
    "name with nul": _names("a\0b", GOOD),
}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Steps 1 and 2 are good, and 3 is there to be forged."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        store.write(state_of(step), step=step, kind="periodic")
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
    assert len(_call("ls", store.directory).splitlines()) == 4
    assert "3 checkpoints, 1 of them cannot be loaded" in _call("verify", store.directory)
    with pytest.warns(RuntimeWarning, match="continues from .*step-000000002"):
        found = newest_in(CheckpointStore(store.directory))
    assert found is not None
    assert holds(store, found, 2)
    with pytest.warns(RuntimeWarning, match="continues from"):
        _call("export", store.directory, "--out", tmp_path / "model.pt")
    assert (tmp_path / "model.pt").is_file()


def _metadata(change: Callable[[Any], None]) -> Forge:
    def forge(folder: Path) -> None:
        found = read_metadata(folder, storage=LocalStorage())
        change(found)
        (folder / METADATA).write_bytes(pickle.dumps(found))
        _seal(folder)

    return forge


def _first(found: Any) -> Any:
    return next(iter(found.state_dict_metadata.values()))


def _shaped(*shape: int) -> Forge:
    def change(found: Any) -> None:
        key, one = next(iter(found.state_dict_metadata.items()))
        found.state_dict_metadata[key] = replace(one, size=torch.Size(shape))

    return _metadata(change)


def _placed(**words: Any) -> Forge:
    def change(found: Any) -> None:
        for key, info in found.storage_data.items():
            found.storage_data[key] = replace(info, **words)

    return _metadata(change)


FOUND_BY_LOADING = {
    "shape of 10**18": _shaped(10**9, 10**9),
    "shape of a hundred gigabytes": _shaped(25, 10**9),
    "tensors elsewhere": _placed(relative_path="../../../../../../dev/zero"),
    "tensors at an absolute path": _placed(relative_path="/dev/zero"),
    "tensors beyond the end": _placed(offset=0, length=10**15),
    "negative length": _placed(length=-1),
    "text for an offset": _placed(offset="0"),
    "no tensors": _metadata(lambda found: found.state_dict_metadata.clear()),
    "number for an index": _metadata(lambda found: setattr(found, "storage_data", 7)),
    "deep state": _text(SHARED_JSON, DEEP),
    "state of another kind": _text(SHARED_JSON, "[1]"),
    "unknown tag": _text(SHARED_JSON, '{"model": {"$import": "os"}}'),
    "strides over a petabyte": _text(
        SHARED_JSON,
        '{"model": {"$tensor": "shared/model.weight", "stride": [1000000000000000, 1]}}',
    ),
    "tensor named by a list": _text(SHARED_JSON, '{"model": {"$tensor": ["a"]}}'),
}


@pytest.mark.parametrize("how", FOUND_BY_LOADING)
def test_forged_inside(how: str, store: CheckpointStore) -> None:
    """What only a load can find is CheckpointCorrupt, before any memory is taken for it."""
    FOUND_BY_LOADING[how](_third(store))
    third = next(one for one in store.committed() if one.step == 3)
    store.verify(third)
    with pytest.raises(CheckpointCorrupt):
        store.load(third)


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
    name=st.sampled_from(["rank", "files", "chunks"]),
    value=_ANY | st.lists(st.lists(_ANY, min_size=7, max_size=7), max_size=2),
)
def test_any_value_in_any_place_of_a_part(name: str, value: Any) -> None:
    """The index of one rank's part is one, typed, or CheckpointCorrupt."""
    body = {"rank": 0, "files": {}, "chunks": [], name: value}
    try:
        found = PartIndex.from_json(json.dumps(body).encode(), where=Path("p"))
    except CheckpointCorrupt:
        return
    assert all(chunk.value_bytes >= 0 for chunk in found.chunks)


def test_a_folder_of_anything(tmp_path: Path) -> None:
    """Files, FIFOs and links that are named like checkpoints, and names with too many digits, are
    problems or nothing."""
    (tmp_path / "step-000000001").write_text("x")
    os.mkfifo(tmp_path / "step-000000002")
    (tmp_path / "step-000000003").symlink_to("/dev/zero")
    (tmp_path / f"step-{'9' * 240}").mkdir()
    (tmp_path / "step-٠٠٠٠٠٠٠٠٤").mkdir()
    found = look(tmp_path, storage=LocalStorage())
    assert [one.key for one in found] == [(1, 1), (2, 1), (3, 1)]
    assert not any(isinstance(one, Checkpoint) for one in found)


def test_good_ones_are_still_good(store: CheckpointStore) -> None:
    """Nothing of this refuses what was written honestly."""
    for one in store.committed():
        store.verify(one)
        assert holds(store, one, one.step)
