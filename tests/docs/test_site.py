"""The site builds, strictly, and its generated pages hold what they promise."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from processes import captured

import hydroslurm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once."""
    target = tmp_path_factory.mktemp("site")
    done = captured(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return target


def test_docstrings_are_rendered(site: Path) -> None:
    """The API's page has an entry for each public name, with its text."""
    page = (site / "api.html").read_text()
    entries = set(re.findall(r'id="hydroslurm[\w.]*\.(\w+)"', page))
    assert set(hydroslurm.__all__) - {"data"} <= entries
    assert "One training over all its" in page


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """The site works without a network: no font, script or style of another host."""
    for page in ("index.html", "cli.html", "api.html"):
        text = (site / page).read_text()
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', text)
        assert loaded == []
