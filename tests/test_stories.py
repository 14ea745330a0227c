"""What has failed is done again for a test that is run again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from processes import captured

RERUN = """
from pathlib import Path

import pytest
from stories import stories

MADE = []


@pytest.fixture(scope="module")
def spoiled():
    MADE.append("spoiled")
    return MADE.count("spoiled")


@pytest.fixture(scope="module")
def told():
    def moody(folder):
        MADE.append(folder.name)
        assert folder.name != "moody", "the first time"
        return folder.name

    with stories({"moody": moody}, Path("."), clusters=(), at_a_time=1) as under_way:
        yield under_way
    assert MADE == ["moody", "spoiled", "spoiled", "moody-2"]


def test_fails_once(told, spoiled):
    assert (told.result("moody", 10.0), spoiled) == ("moody-2", 2)


def test_sees_the_same(told, spoiled):
    assert (told.result("moody", 10.0), spoiled) == ("moody-2", 2)
"""


def test_a_rerun_has_fixtures_of_its_own(tmp_path: Path) -> None:
    """What a fixture of the module holds, and the story that failed: both are made again, once, and
    the next test sees what came of that."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_rerun.py").write_text(RERUN)
    done = captured(
        [sys.executable, "-m", "pytest", "-q", "--reruns=1", "-p", "stories"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        timeout=120,
    )
    assert "2 passed, 1 rerun" in done.stdout, done.stdout + done.stderr
