"""What list says of jobs without a spec, and describe of the attempts of a job."""

from __future__ import annotations

import getpass
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hydroslurm.cli import app
from hydroslurm.core.events import clocks
from hydroslurm.core.files import write_atomically
from hydroslurm.core.rundir import RunDir, comment_for
from hydroslurm.core.status import Moment, RankStatus
from hydroslurm.jobs.supervisor.attempts import Attempt, Ending, count_restarts

RECORDED = Path(__file__).parents[2] / "slurm/recorded/22.05"


def listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, restarts: int, preempted: int, saver: str
) -> str:
    """The cell PREEMPTIONS of a job that was requeued so often, of which its first rank has seen so
    many preemptions. Its squeue is a program that prints one answer, in the form of 22.05.8."""
    run = RunDir(folder / "run").create()
    run.events.mkdir(exist_ok=True)
    now = Moment(*clocks())
    seen = tuple((count, now.epoch_ns) for count in range(preempted))
    status = RankStatus(
        0, "running", now, started=now, as_of=now, job_id=7, saver=saver, preempted=seen
    )
    write_atomically(run.rank_status(0), status.to_json())
    answer = json.loads((RECORDED / "squeue.json").read_text())
    job = {"job_id": 7, "user_name": getpass.getuser(), "comment": comment_for(run)}
    job |= {"restart_cnt": restarts, "start_time": int(time.time()) - 60}
    answer["jobs"] = [{**answer["jobs"][0], **job}]
    programs = folder / "programs"
    programs.mkdir()
    (programs / "answer").write_text(json.dumps(answer))
    (programs / "squeue").write_text(f"#!/bin/sh\nexec cat {programs}/answer\n")
    (programs / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("HYDROSLURM_SLURM_BACKEND", "commands")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    done = CliRunner().invoke(app, ["list"], catch_exceptions=False)
    header, line = done.output.splitlines()
    at = header.index("PREEMPTIONS")
    return line[at:].split()[0]


@pytest.mark.parametrize(
    ("restarts", "preempted", "saver", "said"),
    [
        (0, 0, "", "0"),
        (2, 2, "attempt_began", "2"),
        (3, 2, "attempt_began", "≥2"),
        (1, 0, "stops_taken", "≥0"),
        (3, 0, "", "-"),
    ],
    ids=["never", "all-seen", "one-unseen", "none-seen", "nobody-looks"],
)
def test_preemptions(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restarts: int,
    preempted: int,
    saver: str,
    said: str,
) -> None:
    """Of more restarts than its rank has seen preemptions, the number is a least one; where nobody
    looks there is none."""
    seen = listed(tmp_path, monkeypatch, restarts=restarts, preempted=preempted, saver=saver)
    assert seen == said


@pytest.mark.parametrize(
    ("endings", "restarts"),
    [
        ([], 0),
        ([None], 0),
        ([Ending.FAILED], 0),
        ([Ending.FAILED, Ending.SUCCEEDED], 1),
        ([Ending.FAILED, Ending.RESTARTED, Ending.FAILED], 2),
        ([Ending.PREEMPTED, Ending.LOST, None], 0),
    ],
)
def test_only_a_failure_that_was_followed_by_a_start_is_a_restart(
    endings: list[Ending | None], restarts: int
) -> None:
    """A job that failed once and was given up has had no restart."""
    attempts = [Attempt(n, 0, n, ending=ending) for n, ending in enumerate(endings, 1)]
    assert count_restarts(attempts) == restarts
