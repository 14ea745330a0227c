"""``hydroslurm validate`` and ``render``, as they are typed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs.spec.broken_specs import BROKEN
from processes import captured
from typer.testing import CliRunner, Result

from hydroslurm.cli import app
from hydroslurm.devcluster import DevCluster
from hydroslurm.jobs.spec.reading import load, loads

EXAMPLES = Path(__file__).resolve().parent.parent.parent.parent / "examples"


def run(*message: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in message])


def test_validate_says_what_a_right_spec_is() -> None:
    """Its name and its replicas; nothing else to read."""
    path = EXAMPLES / "job.yaml"
    done = run("validate", path)
    assert (done.exit_code, done.output) == (0, f"{path}: ok: digits, 2 worker\n")


def test_validate_lists_once_what_has_no_meaning() -> None:
    """A manifest is right, and what is left out of it is said in one warning."""
    done = run("validate", EXAMPLES / "t9k-manifest.yaml")
    assert done.exit_code == 0
    ok, warning, *listed = done.output.splitlines()
    assert ok.endswith("ok: digits-ddp, 4 worker")
    assert "no effect on Slurm" in warning
    assert [line.strip() for line in listed] == list(
        load(EXAMPLES / "t9k-manifest.yaml").meaningless
    )


def test_validate_looks_at_every_file(tmp_path: Path) -> None:
    """One that is wrong does not hide the others, and the status says that there was one."""
    wrong = tmp_path / "counts.yaml"
    wrong.write_text(BROKEN["20-counts"].text)
    done = run("validate", wrong, EXAMPLES / "job.yaml", tmp_path / "absent.yaml")
    assert done.exit_code == 1
    for message in ("4 problems in", "job.yaml: ok", "cannot read"):
        assert message in done.output


def test_render_prints_the_resolved_spec() -> None:
    """With --yaml: the same job, every default filled in."""
    path = EXAMPLES / "job.yaml"
    done = run("render", "--yaml", path)
    assert done.exit_code == 0
    assert "warningSeconds: 120" in done.output
    assert loads(done.output).job == load(path).job


def test_render_shows_what_a_priority_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's table is read, and sbatch is told what it says."""
    table = tmp_path / "hydroslurm/config.yaml"
    table.parent.mkdir()
    table.write_text("priorities: {50: {qos: high, nice: 7}}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    done = run("render", EXAMPLES / "t9k-manifest.yaml")
    assert "#SBATCH --qos=high\n" in done.output
    assert "#SBATCH --nice=7\n" in done.output
    assert "priority" not in done.output


def test_render_prints_the_batch_script(tmp_path: Path) -> None:
    """What submit would hand to sbatch, without a trace on the disk."""
    done = run("render", EXAMPLES / "job.yaml", "--folder", tmp_path / "runs")
    assert done.exit_code == 0
    assert "#SBATCH --job-name=digits\n" in done.output
    assert "#SBATCH --partition=low\n" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slurm
def test_render_prints_the_batch_script_of_a_script(
    tmp_path: Path, pause_cluster: DevCluster
) -> None:
    """With the options of submit, whose words are read as submit reads them."""
    script = tmp_path / "train.py"
    script.touch()
    words = ["--folder", tmp_path / "runs", "-p", "low", "--nodes=2", script, "--nodes", "3"]
    done = captured(
        [sys.executable, "-m", "hydroslurm.cli", "render", *map(str, words)],
        env=pause_cluster.child_environ(),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for line in ("#SBATCH --partition=low", "#SBATCH --nodes=2", "#SBATCH --job-name=train"):
        assert f"{line}\n" in done.stdout
    assert "hydroslurm.cli batch --ended" in done.stdout
    assert list(tmp_path.iterdir()) == [script]
