"""The examples in README and the quickstart that are marked ``<!-- run: NAME -->``, as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/quickstart.md")


def _marked(page: str, name: str) -> str:
    found = re.search(
        rf"<!-- run: {name} -->\n```bash\n(.*?)```", (ROOT / page).read_text(), flags=re.S
    )
    assert found, f"{page} has no example {name}"
    # the tests' own environment is the one to be activated
    return found[1].replace("source .venv/bin/activate\n", "")


def _run(script: str, folder: Path) -> str:
    """What the example prints, in a folder that has the examples as the repository has."""
    (folder / "examples").symlink_to(ROOT / "examples")
    bin_dir = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_pause(page: str, tmp_path: Path) -> None:
    """The training is parked, which is said with the latency, and resumed."""
    printed = _run(_marked(page, "pause"), tmp_path)
    assert re.search(r"parked", printed), printed
    assert re.search(r"running", printed), printed


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_stop(page: str, tmp_path: Path) -> None:
    """The training saves at SIGTERM, leaves with 75, and the next start trains to the end."""
    printed = _run(_marked(page, "stop"), tmp_path)
    assert "status 75" in printed, printed
    assert re.search(r"accuracy \d", printed), printed
    assert (tmp_path / "runs/digits/finished.json").exists()
