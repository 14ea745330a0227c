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


def test_validate_looks_at_every_file(tmp_path: Path) -> None:
    """What a right spec is, and in one warning what has no meaning here; one that is wrong does not
    hide the others, and the status says that there was one."""
    right, manifest = EXAMPLES / "job.yaml", EXAMPLES / "t9k-manifest.yaml"
    done = run("validate", right, manifest)
    assert done.exit_code == 0
    first, ok, warning, *listed = done.output.splitlines()
    assert first == f"{right}: ok: digits, 2 worker"
    assert ok.endswith("ok: digits-ddp, 4 worker")
    assert "no effect on Slurm" in warning
    assert [line.strip() for line in listed] == list(load(manifest).meaningless)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(BROKEN["25-torchrun"].text)
    done = run("validate", wrong, right, tmp_path / "absent.yaml")
    assert done.exit_code == 1
    for message in ("3 problems in", "job.yaml: ok", "cannot read"):
        assert message in done.output


def test_render_prints_what_submit_would_hand_to_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a trace on the disk; the user's table says what a priority becomes. With --yaml: the
    same job, every default filled in."""
    (tmp_path / "hydroslurm").mkdir()
    table = tmp_path / "hydroslurm/config.yaml"
    table.write_text("priorities: {50: {qos: high, nice: 7}}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    done = run("render", EXAMPLES / "t9k-manifest.yaml", "--folder", tmp_path / "runs")
    assert done.exit_code == 0
    for line in ("job-name=digits-ddp", "partition=low", "qos=high", "nice=7"):
        assert f"#SBATCH --{line}\n" in done.output
    assert "priority" not in done.output
    assert list(tmp_path.iterdir()) == [table.parent]
    done = run("render", "--yaml", EXAMPLES / "job.yaml")
    assert "warningSeconds: 120" in done.output
    assert loads(done.output).job == load(EXAMPLES / "job.yaml").job


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
