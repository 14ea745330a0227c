"""The examples in README and the quickstart that are marked ``<!-- run: NAME -->``, as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/quickstart.md")


def _marked(name: str) -> str:
    """The example, which is the same in both pages."""
    marked = rf"<!-- run: {name} -->\n```bash\n(.*?)```"
    first, second = (re.findall(marked, (ROOT / page).read_text(), flags=re.S) for page in PAGES)
    assert len(first) == 1
    assert first == second
    # the tests' own environment is the one to be activated
    return str(first[0].replace("source .venv/bin/activate\n", ""))


# what the examples sleep for: a loaded machine may take longer than they say
UNTIL_IT_TRAINS = """
exec >printed 2>&1
sleep() { until grep -qE "^training for|step [0-9]+ loss" printed; do command sleep 0.2; done; }
"""


def _run(script: str, folder: Path) -> str:
    """What the example prints, in a folder that has the examples as the repository has."""
    (folder / "examples").symlink_to(ROOT / "examples")
    bin_dir = Path(sys.executable).parent
    subprocess.run(
        ["bash", "-c", UNTIL_IT_TRAINS + script],
        cwd=folder,
        env={**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    return (folder / "printed").read_text()


def test_pause(tmp_path: Path) -> None:
    """The training is parked, which is said with the latency, and resumed."""
    printed = _run(_marked("pause"), tmp_path)
    assert re.search(r"parked", printed), printed
    assert re.search(r"running", printed), printed


def test_stop(tmp_path: Path) -> None:
    """The training saves at SIGTERM, leaves with 75, and the next start trains to the end."""
    printed = _run(_marked("stop"), tmp_path)
    assert "status 75" in printed, printed
    assert re.search(r"accuracy \d", printed), printed
    assert (tmp_path / "runs/digits/finished.json").exists()
