"""Checkpoints that another user has put where a job, or a person, looks for some."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from checkpoint.states import write
from typer.testing import CliRunner

import hydroslurm
from hydroslurm.checkpoint.newest import newest_good
from hydroslurm.checkpoint.store import CheckpointStore, Retention
from hydroslurm.checkpoint.write_plan import State
from hydroslurm.cli import app
from hydroslurm.errors import CheckpointCorrupt

sys.path.insert(0, str(Path(__file__).parent))
from planting import train

if TYPE_CHECKING:
    from security.conftest import Stranger


def _state(weight: float) -> State:
    return State(shared={"model": {"weight": torch.full((4,), weight)}}, own={"n": 1})


def _weight(state: State) -> float:
    return float(state.shared["model"]["weight"][0])


@pytest.fixture
def forged(lab: Path) -> Path:
    """A whole checkpoint of step 900 with weights of the attacker's choice, for a stranger to copy:
    our own program makes the best forgery."""
    folder = lab / "forge"
    write(CheckpointStore(folder), _state(666.0), step=900, kind="periodic")
    return folder / "step-000000900"


@pytest.fixture
def store(lab: Path) -> CheckpointStore:
    """Ours, of step 3, in a lab's folder where a colleague may make folders."""
    found = CheckpointStore(lab / "checkpoints")
    write(found, _state(1.0), step=3, kind="periodic")
    found.directory.chmod(0o2775)
    return found


def _plant(stranger: Stranger, forged: Path, where: Path) -> Path:
    for path in (forged.parent, forged, *forged.iterdir()):
        path.chmod(0o755)
    stranger.run("cp", "-r", str(forged), str(where))
    return where / forged.name


def test_a_forged_checkpoint_is_passed_over(
    store: CheckpointStore, forged: Path, stranger: Stranger
) -> None:
    """The automatic resume takes our own older one, with one warning that names the planted folder
    and whose it is."""
    planted = _plant(stranger, forged, store.directory)
    reason = f"{planted} belongs to uid {stranger.uid}"
    with pytest.warns(RuntimeWarning, match=reason) as warned:
        found = newest_good(store)
    assert len(warned) == 1
    assert found is not None
    assert (found.checkpoint.step, _weight(store.load(found.checkpoint))) == (3, 1.0)
    assert reason in str(store.problems()[planted])


def test_forged_checkpoints_alone_are_an_error(lab: Path, forged: Path, stranger: Stranger) -> None:
    """Where there is nothing else, neither the forged state is trained on nor is the beginning
    begun again without a word: the run says why."""
    empty = CheckpointStore(lab / "checkpoints")
    empty.directory.mkdir()
    empty.directory.chmod(0o2775)
    _plant(stranger, forged, empty.directory)
    with pytest.raises(CheckpointCorrupt, match=f"belongs to uid {stranger.uid}"):
        newest_good(empty)


def test_forged_checkpoints_do_not_push_ours_out(
    store: CheckpointStore, forged: Path, stranger: Stranger
) -> None:
    """Retention counts only what can be resumed: planted later steps cost none of ours."""
    write(store, _state(2.0), step=4, kind="periodic")
    planted = _plant(stranger, forged, store.directory)
    another = store.directory / "step-000000901"
    stranger.run("cp", "-r", str(planted), str(another))
    assert store.prune(Retention(keep=2)) == ()
    assert [one.step for one in store.committed()] == [3, 4]


def test_a_forged_step_is_saved_again(
    store: CheckpointStore, forged: Path, stranger: Stranger
) -> None:
    """A save of a step that is there already, but is a stranger's, replaces it."""
    _plant(stranger, forged, store.directory)
    with pytest.warns(RuntimeWarning, match="belongs to uid"):
        newest_good(store)
    write(store, _state(5.0), step=900, kind="periodic")
    found = newest_good(store)
    assert found is not None
    assert _weight(store.load(found.checkpoint)) == 5.0


def test_one_forged_file_is_enough(store: CheckpointStore, stranger: Stranger) -> None:
    """A checkpoint of ours with one file that others could write is not resumed."""
    write(store, _state(2.0), step=4, kind="periodic")
    part = next((store.directory / "step-000000004").glob("*.safetensors"))
    part.chmod(0o666)
    with pytest.warns(RuntimeWarning, match=f"others can write {part}"):
        found = newest_good(store)
    assert found is not None
    assert found.checkpoint.step == 3


def test_what_a_person_names_is_loaded(
    store: CheckpointStore, forged: Path, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A colleague's run, named by its path, can be read, exported and started from; and resumed
    once its folder is declared safe."""
    theirs = stranger.home / "run" / "checkpoints"
    stranger.run("mkdir", "-p", str(theirs))
    _plant(stranger, forged, theirs)
    manager = hydroslurm.CheckpointManager(theirs.parent)
    assert _weight(manager.load(step=900)) == 666.0
    assert list(manager.load().shared) == ["model"]
    out = store.directory.parent / "model.pt"
    done = CliRunner().invoke(app, ["checkpoint", "export", str(theirs.parent), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert float(torch.load(out, weights_only=True)["model"]["weight"][0]) == 666.0
    with pytest.raises(CheckpointCorrupt):
        newest_good(CheckpointStore(theirs))
    monkeypatch.setenv("HYDROSLURM_SAFE_DIRECTORY", str(stranger.home))
    found = newest_good(CheckpointStore(theirs))
    assert found is not None
    assert found.checkpoint.step == 900


def test_the_list_of_a_run_says_what_is_not_ours(
    store: CheckpointStore, forged: Path, stranger: Stranger
) -> None:
    """`checkpoint ls` of our own run marks a planted one, and export takes our own newest."""
    planted = _plant(stranger, forged, store.directory)
    done = CliRunner().invoke(app, ["checkpoint", "ls", str(store.directory)])
    lines = {line.split()[0]: line for line in done.output.splitlines()}
    assert lines["900"].endswith("untrusted")
    assert lines["3"].endswith("whole")
    assert planted.exists()


def test_a_forged_checkpoint_of_a_run_is_not_trained_on(
    lab: Path, stranger: Stranger, forged: Path
) -> None:
    """The whole story with a Run: planted weights in its checkpoints folder, a requeue, and the
    run goes on from its own."""
    run = lab / "run"
    assert "at step 0 with 1.0" in (said := train(run).stdout), said
    (run / "checkpoints").chmod(0o2775)
    planted = _plant(stranger, forged, run / "checkpoints")
    done = train(run)
    assert "at step 3 with 2.0" in done.stdout, done.stdout
    assert f"{planted} belongs to uid {stranger.uid}" in done.stdout
