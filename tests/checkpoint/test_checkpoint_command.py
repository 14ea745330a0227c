"""``hydroslurm checkpoint ls|verify|export``."""

from __future__ import annotations

import errno
import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from checkpoint.states import same, state_of, write
from typer.testing import CliRunner

from hydroslurm.checkpoint.export import export
from hydroslurm.checkpoint.store import CheckpointStore, Retention, State, newest_good
from hydroslurm.cli.checkpoint import checkpoint_app
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import CheckpointMissing, SaveFailed, UsageError


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run with a good, a torn, a damaged and a future checkpoint, of steps 1 to 4."""
    run = RunDir(tmp_path / "run").create()
    store = CheckpointStore(run.checkpoints)
    for step in (1, 2, 3, 4):
        write(store, state_of(step), step=step, epoch=1, kind="stop" if step == 1 else "periodic")
    folders = sorted(run.checkpoints.iterdir())
    (folders[1] / "manifest.json").unlink()
    data = bytearray((folders[2] / "part-00000.safetensors").read_bytes())
    data[2000] ^= 1
    (folders[2] / "part-00000.safetensors").write_bytes(data)
    text = (folders[3] / "manifest.json").read_text()
    (folders[3] / "manifest.json").write_text(text.replace('"schema": 3', '"schema": 4'))
    return run


def call(*arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(checkpoint_app, [str(argument) for argument in arguments])
    assert done.exit_code == status, done.output
    return done.output


def test_ls_and_verify(run_dir: RunDir) -> None:
    """Each checkpoint has a line with what it is; a run folder and its checkpoints are the same.
    ``verify`` reads the files: its status is 1 when anything is wrong, and each reason is said. The
    same for programs, as JSON."""
    for where in (run_dir.root, run_dir.checkpoints):
        head, *lines = call("ls", where).splitlines()
        assert head.split()[:3] == ["step", "epoch", "kind"]
        assert lines[0].split()[:3] == ["1", "1", "stop"]
        states = [line.rsplit("  ", 1)[1].strip() for line in lines]
        assert states == ["whole", "torn", "whole", "too new"]
    assert [row["state"] for row in json.loads(call("ls", run_dir.root, "--json"))] == states
    rows = json.loads(call("verify", run_dir.root, "--json", status=1))
    found = [(row["step"], row["state"]) for row in rows]
    assert found == [(1, "whole"), (2, "torn"), (3, "torn"), (4, "too new")]
    assert rows[0]["size_bytes"] > 1000
    assert "part-00000.safetensors" in rows[2]["reason"]
    said = call("verify", run_dir.root, status=1)
    assert "step-000000001: whole" in said
    assert "part-00000.safetensors has checksum" in said
    assert "4 checkpoints, 3 of them cannot be loaded" in said
    good = run_dir.checkpoints / "step-000000001"
    assert "1 checkpoint, nothing is damaged" in call("verify", good)
    call("verify", run_dir.checkpoints / "step-000000003", status=1)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    """A run without checkpoints has none, which is no success of ``verify``; of a folder that is no
    run's, or is not there, it is said."""
    run = RunDir(tmp_path / "run").create()
    run.checkpoints.mkdir()
    for where in (run.root, run.checkpoints):
        assert call("ls", where).splitlines()[-1] == "none"
    call("verify", tmp_path, status=1)
    (run.logs / "notes.txt").touch()
    for verb, where, said in (
        ("ls", tmp_path, "neither a run folder.*it holds run"),
        ("ls", run.logs, r"neither a run folder.*it holds notes\.txt"),
        ("verify", tmp_path / "gone", "gone"),
    ):
        with pytest.raises(CheckpointMissing, match=said):
            CliRunner().invoke(checkpoint_app, [verb, str(where)], catch_exceptions=False)


def test_export(run_dir: RunDir, tmp_path: Path) -> None:
    """The newest good one goes into a file that torch.load reads with weights_only. An unknown
    suffix, an unknown name and values that need unpickling are refused, and leave no file."""
    out = tmp_path / "model.pt"
    with pytest.warns(RuntimeWarning, match="continues from"):
        assert "step 1 of" in call("export", run_dir.root, "--out", out, "--only", "model")
    assert same(torch.load(out, weights_only=True), state_of(1).shared["model"])
    good = CheckpointStore(run_dir.checkpoints).committed()[0]
    call("export", good.path, "--out", out)
    assert same(torch.load(out, weights_only=True), dict(state_of(1).shared))
    for name, only, wanted in (
        ("model.bin", None, r"none of \.pt"),
        ("rng.pt", ["position"], "weights_only"),
        ("x.pt", ["ema"], "it has model"),
    ):
        with pytest.raises((UsageError, CheckpointMissing), match=wanted):
            export(good, tmp_path / name, only=only)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.pt"]


def test_export_for_dcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP's own reader takes every tensor out of the folder, under its dotted name; nothing that
    is there is replaced; a state without tensors and a full disk are named and leave no folder."""
    import torch.distributed.checkpoint as dcp

    store = CheckpointStore(tmp_path / "c")
    done = write(store, state_of(3), step=3, kind="periodic")
    call("export", done.path, "--out", tmp_path / "all.dcp")
    wanted = state_of(3).shared
    moments = wanted["optimizer"]["state"][0]
    names = {f"model.{name}": wanted["model"][name] for name in ("weight", "tied", "bias")}
    names |= {f"optimizer.state.0.{name}": moments[name] for name in ("step", "exp_avg")}
    target = {name: torch.zeros_like(one) for name, one in names.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it loads in a single process
        dcp.load(target, checkpoint_id=tmp_path / "all.dcp", no_dist=True)
    assert same(target, names)
    export(done, tmp_path / "model.dcp", only=["model"])
    metadata = dcp.FileSystemReader(tmp_path / "model.dcp").read_metadata()
    assert set(metadata.state_dict_metadata) == {"weight", "bias", "tied"}
    with pytest.raises(UsageError, match="is there already"):
        export(done, tmp_path / "model.dcp")
    plain = write(store, State({"step": 1}, {}), step=4, kind="manual")
    with pytest.raises(UsageError, match="no tensors"):
        export(plain, tmp_path / "plain.dcp")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(SaveFailed, match=r"full\.dcp cannot be written: .*No space left"):
        export(done, tmp_path / "full.dcp")
    assert {path.name for path in tmp_path.iterdir()} == {"c", "all.dcp", "model.dcp"}


def test_export_as_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested tensors get dotted names; what is no tensor is refused by name. Without the package,
    the message says what to install or to choose."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    store = CheckpointStore(tmp_path / "c")
    weight = torch.randn(3, 3)
    model = {"weight": weight, "tied": weight, "turned": weight.t(), "inner": {"a": weight[0]}}
    done = write(store, State({"model": model, "lr": 0.1}, {}), step=1, kind="manual")
    out = tmp_path / "m.safetensors"
    found = safetensors.load_file(export(done, out, only=["model"]))
    assert set(found) == {"weight", "tied", "turned", "inner.a"}
    assert torch.equal(found["turned"], weight.t())
    with pytest.raises(UsageError, match="lr is a float"):
        export(done, out)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UsageError, match="pip install safetensors"):
        export(done, out)


def test_a_step_that_was_saved_twice(tmp_path: Path) -> None:
    """Both are listed, verified and kept apart, whole or damaged; the later one is the newest,
    whatever asks, and retention lets the earlier one go."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for _ in range(11):
        first = write(store, state_of(1), step=7, kind="manual")
    last = write(store, state_of(3), step=7, kind="manual")
    assert last.path.name == "step-000000007.12"
    assert newest_good(store) == last
    rows = json.loads(call("verify", tmp_path, "--json"))
    assert [row["step"] for row in rows] == [7] * 12
    assert rows[-1]["path"] == str(last.path)
    assert "7.12 " in call("ls", tmp_path)
    assert "step-000000007.12: whole" in call("verify", last.path)
    assert str(last.path) in call("export", tmp_path, "--out", tmp_path / "model.pt")
    store.prune(Retention(keep=2))
    assert [one.key for one in store.committed()] == [(7, 11), (7, 12)]
    (first.path / "shared.json").write_text("{}")
    again = write(CheckpointStore(store.directory), state_of(5), step=7, kind="stop")
    assert newest_good(store) == again
    assert [one.key for one in store.committed()] == [(7, 11), (7, 12), (7, 13)]
