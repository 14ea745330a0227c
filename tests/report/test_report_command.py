"""``hydroslurm report RUN_FOLDER``, as it is typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import captured
from report.ranklog import RankLog

from hydroslurm.core.rundir import RunDir


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    return captured(
        [sys.executable, "-W", "error", "-m", "hydroslurm.cli", "report", *arguments], timeout=60
    )


def test_writes_and_prints(run_dir: RunDir) -> None:
    """The table is printed, figures and pictures are written, and their paths are shown."""
    log = RankLog().installed()
    for number in range(10):
        log.pause(1 + 3 * number, park_us=83 + number)
    log.uninstalled(40).write(run_dir)
    done = report(str(run_dir.root))
    assert (done.returncode, done.stderr) == (0, "")
    assert "aten::linear" in done.stdout
    assert str(run_dir.figures_json) in done.stdout
    assert str(run_dir.timeline_png) in done.stdout
    assert json.loads(run_dir.figures_json.read_text())["park_us"]["p50"] == 87
    assert run_dir.timeline_png.stat().st_size > 5000
    for path in (run_dir.histograms_png, run_dir.report_html, run_dir.trace_json):
        assert str(path) in done.stdout
        assert path.stat().st_size > 500
    assert run_dir.report_html.read_text().count("data:image/png;base64,") == 2
    assert "Slurm could not be asked" in done.stdout


def test_json_without_picture(run_dir: RunDir) -> None:
    """With --json standard output is the figures and nothing else."""
    RankLog().installed().pause(1).uninstalled(5).write(run_dir)
    done = report(str(run_dir.root), "--json", "--no-picture")
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads(run_dir.figures_json.read_text())
    assert not run_dir.timeline_png.exists()


def test_not_a_run_folder(tmp_path: Path) -> None:
    """Another folder gives one line that says what was looked for, exit status 1, and no file."""
    done = report(str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "events/rank-00000.jsonl" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_cannot_be_read_is_named(run_dir: RunDir) -> None:
    """A broken profile in the run's folder leaves the rest of the report standing."""
    RankLog().installed().pause(1).uninstalled(5).write(run_dir)
    run_dir.profile.mkdir()
    (run_dir.profile / "rank-0-restart-0.sqlite").write_text("no database")
    done = report(str(run_dir.root), "--json", "--no-picture", "--no-slurm")
    assert done.returncode == 0
    missing = json.loads(done.stdout)["missing"]
    assert any("rank-0-restart-0.sqlite" in words for words in missing)
    assert "Slurm was not asked (--no-slurm)." in missing


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """Two folders are refused with what to do."""
    done = report(str(tmp_path), str(tmp_path / "other"))
    assert done.returncode != 0
    assert "one run folder" in done.stderr


def test_a_reader_that_leaves(run_dir: RunDir) -> None:
    """Behind `| head` what is not read is not printed; all files are written."""
    RankLog().installed().pause(1).uninstalled(5).write(run_dir)
    nobody, out = os.pipe()
    os.close(nobody)
    command = [sys.executable, "-m", "hydroslurm.cli", "report", "--no-slurm", str(run_dir.root)]
    done = subprocess.run(
        command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(out)
    assert (done.returncode, done.stderr) == (0, "")
    for path in (run_dir.figures_json, run_dir.timeline_png, run_dir.report_html):
        assert path.stat().st_size > 500


def test_without_slurm_one_line(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Slurm that is not here is told in one line, however long the PATH is."""
    RankLog().installed().pause(1).uninstalled(5).write(run_dir)
    monkeypatch.setenv("PATH", ":".join(f"/nowhere/{n:040}" for n in range(20)))
    monkeypatch.setenv("HYDROSLURM_SLURM_BACKEND", "commands")
    said = report(str(run_dir.root), "--no-picture").stdout
    (line,) = (line for line in said.splitlines() if "Slurm" in line)
    assert line == "Slurm could not be asked: no program sacct on PATH."
    assert "/nowhere" not in said
