"""What list says of jobs without a spec."""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hydroslurm.cli import app
from hydroslurm.core.events import clocks
from hydroslurm.core.files import write_atomically
from hydroslurm.core.rundir import RunDir, comment_for
from hydroslurm.core.status import Moment, RankStatus

RECORDED = Path(__file__).parents[2] / "slurm/recorded/22.05"


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
    programs: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restarts: int,
    preempted: int,
    saver: str,
    said: str,
) -> None:
    """Of more restarts than its rank has seen preemptions, the number is a least one; where nobody
    looks there is none. squeue is a program that prints one answer, in the form of 22.05.8."""
    run = RunDir(tmp_path / "run").create()
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
    (tmp_path / "answer").write_text(json.dumps(answer))
    programs(squeue=f"exec cat {tmp_path}/answer")
    monkeypatch.setenv("HYDROSLURM_SLURM_BACKEND", "commands")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    table, text = (
        CliRunner().invoke(app, ["list", *options], catch_exceptions=False).output
        for options in ([], ["--json"])
    )
    header, line = table.splitlines()
    assert line[header.index("PREEMPTIONS") :].split()[0] == said
    told = json.loads(text)
    known, is_least = told["preemptions"], told["preemptions_at_least"]
    assert ("-" if known is None else f"{'≥' * is_least}{known}") == said
    assert (told["job"], told["slurm_state"], told["replicas"]) == ("7", "RUNNING", 1)
