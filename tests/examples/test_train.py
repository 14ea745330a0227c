"""examples/train.py: an ordinary training script, and the same with one line more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until

from hydroslurm.report.reading import read_history
from hydroslurm.runtime import client

STEPS = "240"


@pytest.fixture(scope="module")
def plain(run: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A training that was never paused, in an environment where hydroslurm cannot be imported."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "hydroslurm.py").write_text("raise ImportError('hydroslurm was imported')")
    out = folder / "out.json"
    environ = {"PYTHONPATH": str(folder)}
    output = run("train.py", "--iterations", STEPS, "--out", str(out), environ=environ)
    return {"output": output, **json.loads(out.read_text())}


def test_shows_progress_and_accuracy(plain: dict[str, Any]) -> None:
    """Ten epochs recognise most digits; the steps, their rate and the accuracy are shown."""
    assert plain["steps"] == int(STEPS)
    assert plain["accuracy"] > 0.9
    assert f"accuracy {plain['accuracy']:.2%} on 360 test images" in plain["output"]
    lines = [line for line in plain["output"].splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in lines] == [f"{n}/{STEPS}" for n in (50, 100, 150, 200, 240)]
    assert all("loss" in line and line.endswith("steps/s") for line in lines)


def test_pauses_do_not_change_the_weights(
    plain: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    """Paused by its pid, again and again, the script ends with the bits of the plain run."""
    out, log = tmp_path / "out.json", tmp_path / "log.txt"
    script = str(root / "examples" / "train.py")
    options = ["--pausable", "--iterations", STEPS, "--log-every", "1", "--out", str(out)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", script, *options],
            env={**os.environ, "HYDROSLURM_RUN_DIR": str(tmp_path / "run")},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        for count in (3, 40, 80):

            def far_enough(count: int = count) -> bool:
                assert process.poll() is None, log.read_text()
                return log.read_text().count("\nstep") >= count

            wait_until(far_enough, f"{count} steps")
            assert client.pause(process.pid).done
            assert client.resume(process.pid).done
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert json.loads(out.read_text())["weights_sha256"] == plain["weights_sha256"]
    pauses = read_history(tmp_path / "run").pauses
    assert [(pause.causes, pause.outcome) for pause in pauses] == [(("user",), "complete")] * 3


def test_dry_run(run: Callable[..., str]) -> None:
    """A dry run makes one step and the test."""
    output = run("train.py", "--dry-run", "--batch-size", "16")
    assert [line.split()[1] for line in output.splitlines() if line.startswith("step")] == ["1/1"]
    assert "accuracy" in output
