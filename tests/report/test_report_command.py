"""``hydroslurm report RUN_FOLDER``, as it is typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report.ranklog import RankLog

from hydroslurm.core.rundir import RunDir

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
