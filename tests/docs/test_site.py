"""The site builds, strictly, and its generated pages hold what they promise."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from processes import captured

import hydroslurm

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_is_whole_and_stands_alone(tmp_path: Path) -> None:
    """The API's page has an entry for each public name, with its text; no page needs a network: no
    font, script or style is of another host."""
    done = captured(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api.html").read_text()
    entries = set(re.findall(r'id="hydroslurm[\w.]*\.(\w+)"', api))
    assert set(hydroslurm.__all__) - {"data"} <= entries
    assert "One training over all its" in api
    loaded = r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"'
    for page in ("index.html", "cli.html", "api.html"):
        assert re.findall(loaded, (tmp_path / page).read_text()) == []
