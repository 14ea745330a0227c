"""Every reader of a run folder, in each kind of spoiled one: nothing is raised that is not meant,
nothing is waited for, and what is told can be shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from security.spoiled import KINDS, SPOIL, folder_of

from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.cli.describe import plain_job_lines
from hydroslurm.core import rundir
from hydroslurm.core.ack import judge_pause, wait_for_answers
from hydroslurm.core.files import clean
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import NEVER, RankStatus
from hydroslurm.errors import NoSuchJob, RunFolderError, TargetError
from hydroslurm.jobs.plan import read_submission
from hydroslurm.jobs.requests import pause_job
from hydroslurm.jobs.supervisor.attempts import Attempts
from hydroslurm.jobs.supervisor.tensorboard import read_address
from hydroslurm.observe.find import my_jobs, view_of
from hydroslurm.observe.job import JobView
from hydroslurm.observe.logs import follow_files
from hydroslurm.observe.metrics import JobCollector
from hydroslurm.observe.table import LIST, TOP, as_json, layout
from hydroslurm.observe.watcher import Watcher
from hydroslurm.report import lines
from hydroslurm.report.figures import Report
from hydroslurm.report.reading import read_history
from hydroslurm.report.trace import trace_of
from hydroslurm.report.views import page, report_view
from hydroslurm.report.writing import write_timeline
from hydroslurm.slurm.values import Job, JobState
from hydroslurm.training.attempts import AttemptLog

NO_FILES = ("fifos", "devices", "folders")
"""Kinds that have something else in the place of every file."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    program = textwrap.dedent(SPOIL)
    subprocess.run([sys.executable, "-c", program, str(folder), "/nonexistent"], check=True)
    return folder


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, home: Path) -> RunDir:
    return RunDir(folder_of(home, request.param))


def slurm(*jobs: Job) -> Any:
    """Answers with these jobs, whoever asks, and obeys."""
    return SimpleNamespace(
        jobs=lambda **_: jobs,
        history=lambda _: (),
        jobs_of=lambda job_id: tuple(job for job in jobs if job.is_named(job_id)),
        suspend=lambda _: None,
    )


def _job(run: RunDir, job_id: int = 7) -> Job:
    given: Any = {"name": "n", "user": "u", "partition": "low", "nodes": ("n1", "n2")}
    given |= {"state": JobState.RUNNING, "start_epoch_s": 1, "comment": rundir.comment_for(run)}
    return Job(job_id=job_id, **given)


def test_status(run: RunDir, tmp_path: Path) -> None:
    """Ranks, conditions, attempts: what is typed is told, all else is absent; also where the job
    has no spec. Nothing that lies there is a checkpoint."""
    view = JobView(run, _job(run))
    assert view.problem is None or view.problem.startswith(str(run.events))
    for one in (*view.ranks, *filter(None, [view.condition])):
        json.dumps(vars(one), allow_nan=False)
    without_ranks = (*NO_FILES, "endless", "deep", "unclosed")
    assert bool(view.ranks) == (run.root.name not in without_ranks)
    for read in (AttemptLog(run.attempts_jsonl).attempts, Attempts(run.starts_jsonl).all):
        if run.root.name in NO_FILES:
            with pytest.raises(RunFolderError, match="cannot read"):
                read()
        else:
            assert read() == ()
    assert read_address(run.tensorboard_json) is None
    assert my_jobs(slurm(_job(run)), "u") == ()
    with pytest.raises(RunFolderError):
        read_submission(run.root)
    store = CheckpointStore(run.checkpoints)
    assert store.committed() == ()
    steps = ["step-000000001", "step-000000002", "step-000000003"]
    assert [path.name for path in store.problems()] == steps

    for path in run.root.iterdir():
        if path.name != run.job_yaml.name:
            (tmp_path / path.name).symlink_to(path)
    answers = slurm(_job(RunDir(tmp_path)))
    without_spec = view_of(answers, "7")
    assert not without_spec.has_spec
    lines = [clean(line) for line in plain_job_lines(without_spec)]
    assert lines[0] == "Name:         n"
    assert all(line.isprintable() for line in lines)
    for listed in my_jobs(answers, "u"):
        words = layout(LIST, [listed], 300)[1][0].split()
        assert (words[1], words[5]) == ("n", "0")  # without a limit
        json.dumps(as_json(LIST, listed), allow_nan=False)


def test_top_and_metrics(home: Path) -> None:
    """All of them at once, and each has its line."""
    jobs = tuple(_job(RunDir(folder_of(home, kind)), n) for n, kind in enumerate(KINDS, start=1))
    watcher = Watcher(slurm(*jobs), user=None, policies=False)
    for _ in range(2):
        view = watcher.look()
        assert {row.job.job_id for row in view.rows} == set(range(1, len(KINDS) + 1))
        for row in view.rows:
            json.dumps(as_json(TOP, row), allow_nan=False)
        assert all(line.isprintable() for line in layout(TOP, view.rows, 300)[1])
    families = JobCollector(watcher, every_s=0.0).collect()
    assert {one.name for one in families} >= {"hydroslurm_job_step", "hydroslurm_jobs"}


def test_logs_and_pauses_are_not_waited_for(run: RunDir) -> None:
    """A FIFO or a device in the place of a log is an error in words. Ranks that never answer are
    silent when the time is over; where there are none, the job is left alone."""
    log = run.task_log(0)
    if not log.is_file() or log.is_symlink():
        with pytest.raises(RunFolderError, match="where a regular file was expected"):
            list(follow_files([log]))
    try:
        answer = pause_job(slurm(), _job(run), timeout_s=0.05)
    except TargetError:
        return
    assert answer.silent or answer.answers
    before = RankStatus(0, "running", NEVER)
    path = run.rank_status(0)
    assert wait_for_answers({0: (path, before)}, judge_pause, timeout_s=0.05) == {}


def test_report(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures, tables, page, trace and picture of whatever can be read."""
    monkeypatch.setattr(lines, "_MOST_BYTES", 1 << 26)  # of a GiB, for the endless one
    if run.root.name in NO_FILES:
        with pytest.raises(RunFolderError, match="cannot read"):
            read_history(run.root)
        return
    history = read_history(run.root)
    report = Report(history)
    json.dumps(report.figures.as_dict(), allow_nan=False)
    json.dumps(trace_of(history), allow_nan=False)
    console = Console(markup=False, emoji=False, width=200)
    with console.capture() as said:
        console.print(report_view(report))
    assert all(c.isprintable() or c == "\n" for c in said.get())
    shown = page(report, pictures=[])
    shown.encode()
    assert "<script" not in shown
    write_timeline(history, tmp_path / "report" / "timeline.png")


def test_a_folder_that_is_not_ours_is_not_written(home: Path, tmp_path: Path) -> None:
    """A report goes into a folder of its own, and never through a link."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "events").mkdir(parents=True)
    (tmp_path / "run" / "report").symlink_to(tmp_path / "elsewhere")
    history = read_history(tmp_path / "run")
    with pytest.raises(RunFolderError, match="cannot write"):
        write_timeline(history, tmp_path / "run" / "report" / "timeline.png")
    assert not any((tmp_path / "elsewhere").iterdir())
    (tmp_path / "run" / "report").unlink()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "run" / "report").mkdir()
    (tmp_path / "run" / "report" / f".timeline.png.{os.getpid()}").symlink_to(victim)
    write_timeline(history, tmp_path / "run" / "report" / "timeline.png")
    assert victim.read_text() == "mine"


def test_no_such_folder_at_all(tmp_path: Path) -> None:
    """Names that are too long, or lead through a file, are as good as no folder."""
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file" / "run", tmp_path / ("x" * 5000), tmp_path / "gone"):
        found = JobView(RunDir(root), _job(RunDir(root)))
        assert found.ranks == ()
        watcher = Watcher(slurm(_job(RunDir(root))), user=None, policies=False)
        assert len(watcher.look().rows) == 1
        assert clean(str(found.problem)).isprintable()
        with pytest.raises((RunFolderError, NoSuchJob)):
            read_history(root)
