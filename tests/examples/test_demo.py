"""examples/demo.py where there is no Slurm; with one `make demo` is its own test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hydroslurm.errors import HydroslurmError


def test_second_act_without_slurm(run: Callable[..., str], tmp_path: Path) -> None:
    """A training that is ended twice with SIGTERM and started again has the bits of the other."""
    output = run("demo.py", "--local", "--act", "2", "--epochs", "4", "--dir", str(tmp_path))
    assert "the same weights, optimizer and losses, bit for bit, after 2 stops" in output
    assert "Steps lost: 0." in output
    assert "attempt 2 resumes from step" in output
    (picture,) = tmp_path.glob("*/act-2/runs/stopped/report/timeline.png")
    assert picture.stat().st_size > 5000


def test_a_wait_that_fails_shows_what_was_waited_for_and_the_log(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the log's name and its last ten lines; the wait itself fits the machine."""
    monkeypatch.syspath_prepend(root / "examples")
    import demo_stage

    log = tmp_path / "logs/task.out"
    log.parent.mkdir()
    log.write_text("".join(f"line {number}\n" for number in range(12)))
    monkeypatch.setattr(demo_stage, "LIMIT_S", 0.01)
    monkeypatch.setattr(demo_stage.pace, "slowness", 5.0)
    with pytest.raises(HydroslurmError, match="for the first step") as failed:
        demo_stage.wait_for("the first step", lambda: False, run=tmp_path)
    words = str(failed.value).splitlines()
    assert words[0].endswith(f"The end of {log}:")
    assert [word.strip() for word in words[1:]] == [f"line {number}" for number in range(2, 12)]


def test_a_site_shows_one_act(root: Path) -> None:
    """On a site's Slurm the act has to be named, because a partition can show only one."""
    command = [
        sys.executable,
        str(root / "examples" / "demo.py"),
        "--site",
        "--low=a",
        "--urgent=b",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--act 1, 2 or 3" in done.stderr
