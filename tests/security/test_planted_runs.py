"""What another user puts into a run folder beforehand, or in its place, checkpoints included."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from checkpoint.states import write
from security.planting import job, python, train
from typer.testing import CliRunner

import hydroslurm
from hydroslurm.checkpoint.store import CheckpointStore, Retention, newest_good
from hydroslurm.checkpoint.write_plan import State
from hydroslurm.cli import app
from hydroslurm.core.events import Event, EventKind, EventLog
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import CheckpointCorrupt, RunFolderError
from hydroslurm.jobs.supervisor.attempts import Attempts
from hydroslurm.jobs.supervisor.conditions import add_condition
from hydroslurm.jobs.supervisor.job_step import start_step
from hydroslurm.runtime.journal import StatusWriter
from hydroslurm.training.attempts import AttemptLog, finished_step, write_finished

if TYPE_CHECKING:
    from security.conftest import Stranger


FINISHED = '{"v": 1, "step": 7, "epoch_ns": 1}'


def _plant_run(stranger: Stranger, folder: Path) -> None:
    """A run folder that welcomes its victim: everybody may write, and it has finished already."""
    for part in ("events", "logs", "checkpoints"):
        stranger.plant(folder / part / "here")
    stranger.plant(folder / "finished.json", FINISHED)


def test_a_job_does_not_obey_a_run_folder_that_was_there_before(
    scratch: Path, stranger: Stranger
) -> None:
    """A neighbour who guesses the job's number makes its folder in a shared scratch, with a marker
    that says finished: the training refuses it with whose it is, and does not end with 0."""
    _plant_run(stranger, scratch / "hydroslurm-runs" / "1234")
    done = train(**job(scratch))
    assert done.returncode == 1, done.stdout
    assert f"1234 belongs to uid {stranger.uid}" in done.stdout
    assert "HYDROSLURM_RUN_DIR" in done.stdout
    assert "has finished" not in done.stdout


def test_pausing_works_beside_a_planted_run_folder(scratch: Path, stranger: Stranger) -> None:
    """Where only pausing is installed the training goes on, with a warning; nothing is written
    through the links that lie there, and the process answers to a pause all the same."""
    victim = scratch / "thesis.txt"
    victim.write_text("ours")
    victim.chmod(0o600)
    planted = scratch / "hydroslurm-runs" / "1234"
    _plant_run(stranger, planted)
    for name in ("rank-00000.jsonl", "rank-00000.json"):
        stranger.run("ln", "-s", str(victim), str(planted / "events" / name))
    code = """
        import os, torch, hydroslurm
        from hydroslurm.runtime import client
        controller = hydroslurm.install()
        import threading
        said = []
        def person():
            said.append(client.pause(os.getpid(), timeout_s=60).done)
            client.resume(os.getpid(), timeout_s=60)
        helper = threading.Thread(target=person)
        helper.start()
        linear = torch.nn.Linear(1, 1)
        while helper.is_alive():
            linear(torch.ones(1))
        print("parked", said)
    """
    done = python(code, HYDROSLURM_HEARTBEAT_S="0.1", **job(scratch))
    assert done.returncode == 0, done.stdout
    assert "parked [True]" in done.stdout
    assert done.stdout.count(f"belongs to uid {stranger.uid}") == 1
    assert victim.read_text() == "ours"


def test_a_job_in_a_shared_scratch_makes_a_folder_of_its_own(scratch: Path) -> None:
    """Without any attack two attempts of a job below a sticky folder go on from each other,
    whatever the umask is, and nobody else can look into the run folder."""
    first, second = (train(umask=umask, **job(scratch)) for umask in ("0000", "0077"))
    assert "at step 0 with 1.0" in first.stdout, first.stdout
    assert "at step 3 with 2.0" in second.stdout, second.stdout
    assert "is not used" not in first.stdout + second.stdout
    run = scratch / "hydroslurm-runs" / "1234"
    assert run.stat().st_mode & 0o777 == 0o700


ATTEMPTS = "".join(
    f'{{"attempt": {attempt}, "began_epoch_ns": 1, "step": 3}}\n' for attempt in range(1, 40)
)
"""A run that has failed too often."""


def test_a_run_in_a_labs_folder_goes_on_whatever_is_planted_there(
    lab: Path, stranger: Stranger
) -> None:
    """Below drwxrws--- with umask 0002 two attempts go on from each other, without a word: the
    folders are the group's, and the files of the checkpoints nobody else's. A colleague's marker
    and attempts are then named in one warning each and count for nothing; ours are written again.
    A link in the place of the attempts is not followed."""
    run = lab / "runs" / "a"
    assert "at step 0 with 1.0" in (said := train(run, umask="0002").stdout), said
    assert "at step 3 with 2.0" in (said := train(run, umask="0002").stdout), said
    assert "is not used" not in said
    written = [path for path in run.rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if path.stat().st_mode & 0o022]

    marker, attempts = run / "finished.json", run / "attempts.jsonl"
    attempts.unlink()
    stranger.plant(marker, FINISHED)
    stranger.plant(attempts, ATTEMPTS)
    assert "at step 6 with 3.0" in (said := train(run, umask="0002").stdout), said
    for planted in (marker, attempts):
        assert said.count(f"{planted} belongs to uid {stranger.uid}") == 1
    write_finished(RunDir(run), step=9)
    assert finished_step(RunDir(run)) == 9
    assert [one.number for one in AttemptLog(attempts).attempts()] == [1]
    assert marker.stat().st_uid == attempts.stat().st_uid == os.getuid()

    marker.unlink()
    victim = lab / "diary.txt"
    victim.write_text("ours")
    attempts.unlink()
    stranger.run("ln", "-s", str(victim), str(attempts))
    assert "at step 9 with 4.0" in (said := train(run, umask="0002").stdout), said
    assert victim.read_text() == "ours"


def test_writers_follow_no_links(
    tmp_path: Path, lab: Path, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events, conditions, attempts, srun's log, the journal of attempts, the status, and temporary
    files that are renamed, even where a stranger guessed their random names: a link in their place
    that leads to a file of the owner's leaves that file as it was."""
    victim = tmp_path / "mine"
    victim.write_text("ours")
    target = stranger.home / "target"
    monkeypatch.setattr(os, "urandom", bytes)
    guessed = lab / f".finished.json.{os.getpid()}-{bytes(4).hex()}"
    for link in (target, lab / "starts.jsonl", guessed):
        stranger.run("ln", "-s", str(victim), str(link))
    event = Event(kind=EventKind.INSTALLED, mono_ns=1, epoch_ns=1)
    with pytest.warns(RuntimeWarning, match="a symbolic link"):
        EventLog(target).append(event)
    with pytest.raises(RunFolderError):
        add_condition(target, "Running")
    with pytest.raises(RunFolderError):
        AttemptLog(target).begin(0, now_epoch_ns=1, job_id=None, restart_count=0)
    with pytest.raises(OSError, match="a symbolic link"):
        start_step(["echo", "words"], environ=os.environ, log=target).wait(1e9)
    with pytest.raises(RunFolderError):
        Attempts(lab / "starts.jsonl").begin(0)
    with pytest.raises(RunFolderError):
        write_finished(RunDir(lab), step=1)
    writer = StatusWriter(target, every_s=0.0)
    writer.note(event)
    writer.close(step=1)
    assert victim.read_text() == "ours"


def test_every_part_of_a_run_folder_and_what_is_above_is_looked_at(
    lab: Path, tmp_path: Path, stranger: Stranger
) -> None:
    """A colleague's `events` in a folder of ours that the group may write is refused at the start:
    what is written there would go where its owner likes. Below a folder where everybody may replace
    it a run folder is not used, unless the user says so."""
    run = lab / "run"
    run.mkdir()
    run.chmod(0o2775)
    stranger.run("mkdir", str(run / "events"))
    with pytest.raises(RunFolderError, match=f"events belongs to uid {stranger.uid}"):
        RunDir(run).check()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch").chmod(0o777)
    with pytest.raises(RunFolderError, match=r"chmod go-w .*HYDROSLURM_SAFE_DIRECTORY"):
        RunDir(tmp_path / "scratch" / "run").create()


def test_a_folder_declared_safe_is_used(
    tmp_path: Path, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HYDROSLURM_SAFE_DIRECTORY lets a run folder be whoever's, and what a link below it leads to
    is not in it."""
    run = RunDir(stranger.home / "run")
    stranger.run("mkdir", str(run.root), check=False)
    monkeypatch.setenv("HYDROSLURM_SAFE_DIRECTORY", f"relative:{stranger.home}")
    run.check()
    (tmp_path / "link").symlink_to(run.root)
    monkeypatch.setenv("HYDROSLURM_SAFE_DIRECTORY", str(tmp_path))
    with pytest.raises(RunFolderError, match="belongs to uid"):
        RunDir(tmp_path / "link").check()


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
    assert float(store.load(found).shared["model"]["weight"][0]) == 5.0


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
    assert found.step == 3


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
    assert found.step == 900
