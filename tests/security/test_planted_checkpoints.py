"""Checkpoints that another user has put where a job, or a person, looks for some."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from checkpoint.states import write
from security.planting import train
from typer.testing import CliRunner

import hydroslurm
from hydroslurm.checkpoint.newest import newest_good
from hydroslurm.checkpoint.store import CheckpointStore, Retention
from hydroslurm.checkpoint.write_plan import State
from hydroslurm.cli import app
from hydroslurm.errors import CheckpointCorrupt

if TYPE_CHECKING:
    from security.conftest import Stranger


def _state(weight: float) -> State:
    return State(shared={"model": {"weight": torch.full((4,), weight)}}, own={"n": 1})


@pytest.fixture
def forged(lab: Path) -> Path:
    """A whole checkpoint of step 900 with weights of the attacker's choice, for a stranger to copy:
    our own program makes the best forgery."""
    folder = lab / "forge"
    write(CheckpointStore(folder), _state(666.0), step=900, kind="periodic")
    made = folder / "step-000000900"
    for path in (folder, made, *made.iterdir()):
        path.chmod(0o755)
    return made


def test_a_forged_checkpoint_of_a_run_counts_for_nothing(
    lab: Path, stranger: Stranger, forged: Path
) -> None:
    """Planted weights in a run's checkpoints folder, where a colleague may make folders: a requeued
    run goes on from its own, with one warning that names the planted folder and whose it is; they
    push none of ours out; `ls` marks them; and a save of that step replaces them."""
    run = lab / "run"
    assert "at step 0 with 1.0" in (said := train(run).stdout), said
    store = CheckpointStore(run / "checkpoints")
    store.directory.chmod(0o2775)
    planted = store.directory / forged.name
    stranger.run("cp", "-r", str(forged), str(planted))
    reason = f"{planted} belongs to uid {stranger.uid}"
    assert "at step 3 with 2.0" in (said := train(run).stdout), said
    assert said.count(reason) == 1
    assert reason in str(store.problems()[planted])

    stranger.run("cp", "-r", str(planted), str(store.directory / "step-000000901"))
    assert store.prune(Retention(keep=2)) == ()
    assert [one.step for one in store.committed()] == [3, 6]
    done = CliRunner().invoke(app, ["checkpoint", "ls", str(store.directory)])
    marks = {line.split()[0]: line.split()[-1] for line in done.output.splitlines()}
    assert (marks["3"], marks["900"]) == ("whole", "untrusted")
    with pytest.warns(RuntimeWarning, match="belongs to uid"):
        newest_good(store)
    write(store, _state(5.0), step=900, kind="periodic")
    with pytest.warns(RuntimeWarning, match="belongs to uid"):
        found = newest_good(store)
    assert found is not None
    assert float(store.load(found.checkpoint).shared["model"]["weight"][0]) == 5.0


def test_forged_checkpoints_alone_are_an_error(lab: Path, forged: Path, stranger: Stranger) -> None:
    """Where there is nothing else, neither the forged state is trained on nor is the beginning
    begun again without a word: the run says why."""
    empty = CheckpointStore(lab / "checkpoints")
    empty.directory.mkdir()
    empty.directory.chmod(0o2775)
    stranger.run("cp", "-r", str(forged), str(empty.directory))
    with pytest.raises(CheckpointCorrupt, match=f"belongs to uid {stranger.uid}"):
        newest_good(empty)


def test_one_forged_file_is_enough(lab: Path) -> None:
    """A checkpoint of ours with one file that others could write is not resumed."""
    store = CheckpointStore(lab / "checkpoints")
    for step in (3, 4):
        write(store, _state(step), step=step, kind="periodic")
    part = next((store.directory / "step-000000004").glob("*.safetensors"))
    part.chmod(0o666)
    with pytest.warns(RuntimeWarning, match=f"others can write {part}"):
        found = newest_good(store)
    assert found is not None
    assert found.checkpoint.step == 3


def test_what_a_person_names_is_loaded(
    lab: Path, forged: Path, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A colleague's run, named by its path, can be read, exported and started from; and resumed
    once its folder is declared safe."""
    theirs = stranger.home / "run" / "checkpoints"
    stranger.run("mkdir", "-p", str(theirs))
    stranger.run("cp", "-r", str(forged), str(theirs))
    manager = hydroslurm.CheckpointManager(theirs.parent)
    assert float(manager.load(step=900).shared["model"]["weight"][0]) == 666.0
    assert list(manager.load().shared) == ["model"]
    out = lab / "model.pt"
    done = CliRunner().invoke(app, ["checkpoint", "export", str(theirs.parent), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert float(torch.load(out, weights_only=True)["model"]["weight"][0]) == 666.0
    with pytest.raises(CheckpointCorrupt):
        newest_good(CheckpointStore(theirs))
    monkeypatch.setenv("HYDROSLURM_SAFE_DIRECTORY", str(stranger.home))
    found = newest_good(CheckpointStore(theirs))
    assert found is not None
    assert found.checkpoint.step == 900
