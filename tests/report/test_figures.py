"""figures.json is what its schema and its page say; and hydroslurm report, as it is typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from report.profiles import profile_of
from report.ranklog import RankLog
from report.views import figures_of, history_of
from typer.testing import CliRunner

from hydroslurm.cli import app
from hydroslurm.core.rundir import RunDir
from hydroslurm.report.external_sources import Accounting
from hydroslurm.report.figures import reference, schema, schema_text
from hydroslurm.report.history import History, summary
from hydroslurm.report.reading import read_history
from hydroslurm.report.stops import SlurmAttempt

ROOT = Path(__file__).resolve().parents[2]


def test_fifty_pauses_on_four_ranks(run_dir: RunDir) -> None:
    """200 pauses: each is counted once, under its cause, and the percentiles are of all of them;
    one that was cut off counts as a pause, and as incomplete. Unknown latencies are not zeros."""
    for rank in range(4):
        log = RankLog(rank=rank, pid=100 + rank).installed()
        for number in range(50):
            cause = "slurm" if number % 2 else "user"
            log.pause(2 * number + 1, cause=cause, park_us=4 * number + rank + 1)
        log.write(run_dir)
    figures = figures_of(read_history(run_dir.root))
    assert (figures.pauses, figures.incomplete, figures.ranks) == (200, 0, 4)
    assert figures.park_us == {"count": 200, "p50": 100, "p99": 198, "max": 200}
    by_cause = {cause: group.pauses for cause, group in figures.by_cause.items()}
    assert by_cause == {"slurm": 100, "user": 100}
    assert figures.parked_total_s == pytest.approx(200, abs=0.1)
    assert [row.at_s for row in figures.every_pause[:2]] == pytest.approx([1, 3])
    log.pause(103, until="parked").write(run_dir)
    figures = figures_of(read_history(run_dir.root))
    assert figures.incomplete == 1
    assert figures.every_pause[-1].outcome == "not resumed"
    assert summary([3.0, None, 1.0]) == {"count": 2, "p50": 1.0, "p99": 3.0, "max": 3.0}
    assert summary([None]) == {"count": 0}


def test_every_field_is_described_with_its_unit() -> None:
    """The page says of each field what it means; a float without a unit in its name is a ratio."""
    units = ("_s", "_ms", "_us", "_ns", "p50", "p99", "max", "of_allocated", "of_wall")
    for part in (schema(), *schema()["$defs"].values()):
        for name, field in part["properties"].items():
            assert field["description"].strip(), name
            kinds = field.get("type")
            if "number" in (kinds if isinstance(kinds, list) else [kinds]):
                assert name.endswith(units), name


def test_figures_of_everything_and_of_nothing_are_valid(tmp_path: Path) -> None:
    """What is written is what the schema allows, with every source and with none."""
    validator = jsonschema.Draft202012Validator(schema())
    validator.check_schema(schema())
    log = RankLog(pid=1).trains(0, attempt=1).pause(4).pause(6, until="parked")
    log.stop(10, step=40)
    history = history_of(log, RankLog(pid=2, restart_count=1).trains(20, attempt=2, step=30))
    attempts = tuple(
        SlurmAttempt(7, n, "REQUEUED", *(1_700_000_000 + at for at in moments), suspended_s=1)
        for n, moments in enumerate(((-5, -4, -2, 11), (11, 15, 18, 40)))
    )
    sources = (Accounting(attempts, 2), (profile_of(tmp_path, 1),), ("something",))
    full = figures_of(history, *sources)
    assert full.every_pause[0].nsys is not None
    assert full.stops.every_stop[0].slurm_after is not None
    for figures in (full, figures_of(history), figures_of(History(name="x"))):
        validator.validate(json.loads(json.dumps(figures.as_dict(), allow_nan=False)))


def test_the_page_and_the_command_print_the_schema() -> None:
    """docs/figures.md ends with what ``hydroslurm report --schema --markdown`` prints."""
    page = (ROOT / "docs/figures.md").read_text()
    _, _, made = page.partition("by `hydroslurm report --schema --markdown`.\n\n")
    run = CliRunner().invoke
    assert run(app, ["report", "--schema", "--markdown"]).output == made == reference()
    assert run(app, ["report", "--schema"]).output == schema_text()


REPORT = [sys.executable, "-W", "error", "-m", "hydroslurm.cli", "report"]


def report(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*REPORT, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, text=True, timeout=60, **pipes)


def test_writes_and_prints(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is printed, figures and pictures are written, and their paths are shown. A Slurm
    that is not here is told in one line, however long the PATH is."""
    log = RankLog().installed()
    for number in range(10):
        log.pause(1 + 3 * number, park_us=83 + number)
    log.uninstalled(40).write(run_dir)
    monkeypatch.setenv("PATH", ":".join(f"/nowhere/{n:040}" for n in range(20)))
    monkeypatch.setenv("HYDROSLURM_SLURM_BACKEND", "commands")
    done = report(run_dir.root)
    assert (done.returncode, done.stderr) == (0, "")
    assert "aten::linear" in done.stdout
    assert json.loads(run_dir.figures_json.read_text())["park_us"]["p50"] == 87
    for path in (
        *(run_dir.figures_json, run_dir.timeline_png, run_dir.histograms_png),
        *(run_dir.report_html, run_dir.trace_json),
    ):
        assert str(path) in done.stdout
        assert path.stat().st_size > 500
    assert run_dir.report_html.read_text().count("data:image/png;base64,") == 2
    (line,) = (line for line in done.stdout.splitlines() if "Slurm" in line)
    assert line == "Slurm could not be asked: no program sacct on PATH."


def test_json_without_a_picture(run_dir: RunDir) -> None:
    """With --json standard output is the figures and nothing else; a broken profile in the run's
    folder leaves the rest of the report standing, and is named."""
    RankLog().installed().pause(1).uninstalled(5).write(run_dir)
    run_dir.profile.mkdir()
    (run_dir.profile / "rank-0-restart-0.sqlite").write_text("no database")
    done = report(run_dir.root, "--json", "--no-picture", "--no-slurm")
    assert done.returncode == 0
    figures = json.loads(done.stdout)
    assert figures == json.loads(run_dir.figures_json.read_text())
    assert not run_dir.timeline_png.exists()
    assert any("rank-0-restart-0.sqlite" in words for words in figures["missing"])
    assert "Slurm was not asked (--no-slurm)." in figures["missing"]


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    """Another folder gives one line that says what was looked for, exit status 1, and no file; two
    folders are refused with what to do."""
    done = report(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "events/rank-00000.jsonl" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    done = report(tmp_path, tmp_path / "other")
    assert done.returncode != 0
    assert "one run folder" in done.stderr


def test_the_picture_of_an_elastic_run_follows_no_link(run_dir: RunDir, tmp_path: Path) -> None:
    """Whoever reports on another user's run overwrites nothing elsewhere: a planted link is
    replaced by the picture."""
    RankLog().installed().pause(1).uninstalled(5).write(run_dir)
    (run_dir.root / "elastic").mkdir()
    generation = {"kind": "generation", "epoch_ns": 10**18, "members": ["7"], "step": 3}
    change = {"lost": [], "left": [], "joined": ["7"], "cause": "start", "pause_s": 0.1}
    (run_dir.root / "elastic" / "ledger.jsonl").write_text(json.dumps(generation | change) + "\n")
    elsewhere, picture = tmp_path / "elsewhere", run_dir.timeline_png.with_name("sizes.png")
    elsewhere.write_text("theirs")
    picture.parent.mkdir()
    picture.symlink_to(elsewhere)
    done = report("--no-slurm", run_dir.root)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(picture) in done.stdout
    assert elsewhere.read_text() == "theirs"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not picture.is_symlink()


def test_a_reader_that_leaves(run_dir: RunDir) -> None:
    """Behind `| head` what is not read is not printed; all files are written."""
    RankLog().installed().pause(1).uninstalled(5).write(run_dir)
    nobody, out = os.pipe()
    os.close(nobody)
    done = report("--no-slurm", run_dir.root, stdout=out)
    os.close(out)
    assert (done.returncode, done.stderr) == (0, "")
    for path in (run_dir.figures_json, run_dir.timeline_png, run_dir.report_html):
        assert path.stat().st_size > 500
