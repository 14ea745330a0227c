"""What describe and status tell of an elastic run and of a member's job."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elasticstory import formed
from typer.testing import CliRunner

from hydroslurm.cli import app
from hydroslurm.cli.describe import plain_job_lines
from hydroslurm.cli.elastic import elastic_lines, member_lines, size_line
from hydroslurm.cli.status import _print_status
from hydroslurm.core.rundir import RunDir, comment_for_members
from hydroslurm.elastic.coordinator import Coordinator
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.elastic.roster import MemberState, Send, Size
from hydroslurm.observe.job import JobView
from hydroslurm.observe.training import ranks_dir_of
from hydroslurm.slurm.values import Job, JobState


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    """Of members 124_0 and 124_1, of which the second has left after step 7."""
    ranks = [("124_0", 0), ("124_1", 0)]
    size = Size(min=1, max=2, wanted=2)
    one = formed(ElasticFolder(run=tmp_path), "124_0", "124_1", size=size)
    machine, now_s = one.membership, time.monotonic()
    try:
        one.act(machine.leave(ranks[1], "SIGTERM", now_s))
        assert machine.change is not None
        number = machine.change.number
        for tell in (machine.proposed, machine.arrived):
            for rank in ranks:
                one.act(tell(rank, number, 7, now_s))
        one.act(machine.formed(ranks[0], machine.change.number, True, 0.25, now_s))
        one.on_round()
        yield one
    finally:
        one.close()


def test_what_others_could_have_written_is_not_shown(tmp_path: Path) -> None:
    """And does not keep status from showing the other jobs."""
    folder = ElasticFolder(run=tmp_path)
    folder.write(folder.status_json, {"state": "Running", "members": []})
    folder.status_json.chmod(0o666)
    assert "others can write" in str(size_line(RunDir(tmp_path)))
    (first, *_) = member_lines(RunDir(tmp_path), "124_0")
    assert first.startswith(f"Member:       124_0 of {tmp_path}, which cannot be read: ")
    assert "others can write" in first


def described(run: Path) -> str:
    result = CliRunner().invoke(app, ["describe", str(run)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.usefixtures("coordinator")
def test_what_a_run_has_come_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members, and what each change cost, from the coordinator's files alone; and when the
    coordinator is gone that they are old, and what to do."""
    monkeypatch.setenv("PATH", "/nonexistent")
    said = described(tmp_path)
    assert "1 train, 2 are wanted, 1 to 2 are allowed" in said
    assert "Generation:   2, Running, step 7" in said
    assert "  124_0  Running on n1, 1 rank\n" in said
    assert "Ended:        0 preempted, 0 failed" in said
    change = "generation 2 of 1 at step 7; left: 124_1; paused 0.25 s, 0 steps lost (leave (124_1:"
    assert change in said
    assert "Coordinator:" not in said
    folder = ElasticFolder(run=tmp_path)
    status = json.loads(folder.status_json.read_text())
    folder.write(folder.status_json, {**status, "written_epoch_s": time.time() - 60})
    said = described(tmp_path)
    assert re.search(r"Coordinator:  has written nothing for \d\d s \(job ", said)
    own = {**status, "written_epoch_s": 0.0, "coordinator": {**status["coordinator"], "job_id": 9}}
    folder.write(folder.status_json, own)
    for state, becomes in (
        (JobState.SUSPENDED, "its job is SUSPENDED; it continues when"),
        (JobState.PENDING, "its job waits in Slurm, and starts another one"),
        (JobState.CANCELLED, "its job has ended, and nothing starts another one"),
    ):
        lines = elastic_lines(RunDir(tmp_path), Job(job_id=9, state=state))
        assert becomes in "\n".join(lines)


def test_a_member_that_is_paused_is_shown(coordinator: Coordinator, tmp_path: Path) -> None:
    """From its first beat that says so to the first that does not; another member is told."""
    machine, now_s = coordinator.membership, time.monotonic()
    for name in ("124_0", "124_1"):
        machine.members.setdefault(name, MemberState(name, "n1", 1, 2, now_s)).present.add(0)
    machine.current = ("124_0", "124_1")
    for paused in (True, True, False):
        actions = machine.beat(("124_1", 0), 7, now_s, paused=paused)
        coordinator.act(actions)
        told = [(one.to, one.message["type"]) for one in actions if isinstance(one, Send)]
        coordinator.announce()
        if paused:
            coordinator._status_due_s = 0.0
            coordinator.on_round()
            assert "124_1  Paused on n1, 1 rank (the others wait)" in described(tmp_path)
        assert told in ([], [(("124_0", 0), "paused")])
    changes = described(tmp_path)
    assert changes.count("124_1 on n1 was paused: the others wait for it") == 1
    assert changes.count("124_1 on n1 was continued") == 1


@pytest.mark.usefixtures("coordinator")
@pytest.mark.parametrize(
    ("task", "now"),
    [
        (0, "124_0  Running on n1, 1 rank, since "),
        (1, "124_1  is none any more since "),
        (2, "124_2  has not joined yet"),
    ],
)
def test_a_job_of_a_member(
    tmp_path: Path, task: int, now: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both verbs say what it is to its run, and how that stands."""
    comment = comment_for_members(RunDir(tmp_path))
    job = Job(
        job_id=457,
        state=JobState.RUNNING,
        comment=comment,
        array_job_id=124,
        array_task_id=task,
    )
    found = JobView(ranks_dir_of(job), job)
    assert found.run.root == tmp_path / "elastic" / "members" / f"124_{task}"
    _print_status(found)
    told = capsys.readouterr().out
    for said in (told, "\n".join(plain_job_lines(found))):
        assert f"Member:       {now}" in said
        assert f"Of:           {tmp_path}" in said
        assert "Running, generation 2, step 7: 1 train, 2 are wanted" in said


def test_status_names_what_it_takes() -> None:
    """What is no id of a job is refused with one that is."""
    result = CliRunner().invoke(app, ["status", "twelve"])
    assert result.exit_code == 1
    assert "'twelve' is no job id; wanted one as Slurm prints it: 44, 44_3" in str(result.exception)
