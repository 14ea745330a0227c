"""examples/demo.py where there is no Slurm; with one `make demo` is its own test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def test_second_act_without_slurm(run: Callable[..., str], tmp_path: Path) -> None:
    """A training that is ended twice with SIGTERM and started again has the bits of the other."""
    output = run("demo.py", "--local", "--act", "2", "--epochs", "4", "--dir", str(tmp_path))
    assert "the same weights, optimizer and losses, bit for bit, after 2 stops" in output
    assert "Steps lost: 0." in output
    assert "attempt 2 resumes from step" in output
    (picture,) = tmp_path.glob("*/act-2/runs/stopped/report/timeline.png")
    assert picture.stat().st_size > 5000


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
