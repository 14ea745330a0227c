"""What has failed is done again for a test that is run again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import captured
from stories import stories

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
        return folder.name

    with stories({"moody": moody}, Path("."), clusters=(), at_a_time=1) as under_way:
        yield under_way
    assert MADE == ["moody", "spoiled", "spoiled", "moody-2"]


def test_fails_once(told, spoiled):
    assert (told.result("moody", 10.0), spoiled) == ("moody-2", 2)


def test_sees_the_same(told, spoiled):
    assert (told.result("moody", 10.0), spoiled) == ("moody-2", 2)
"""


def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    """The first one who asks gets the failure, the next one another telling, in a new folder; a
    story that is well is told once."""
    told: list[str] = []

    def fails_once(folder: Path) -> str:
        told.append(folder.name)
        assert len(told) > 1, "the first time"
        return folder.name

    stories_of = {"moody": fails_once, "steady": lambda folder: folder.name}
    with stories(stories_of, tmp_path, clusters=(), at_a_time=1) as under_way:
        with pytest.raises(AssertionError, match="the first time"):
            under_way.result("moody", 10.0)
        for _ in range(2):
            assert under_way.result("moody", 10.0) == "moody-2"
            assert under_way.result("steady", 10.0) == "steady"
    assert told == ["moody", "moody-2"]


def test_a_rerun_has_fixtures_of_its_own(tmp_path: Path) -> None:
    """What a fixture of the module holds, and the story that the test has looked at: both are made
    again, once, and the next test sees what came of that."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_rerun.py").write_text(RERUN)
    done = captured(
        [sys.executable, "-m", "pytest", "-q", "--reruns=1", "-p", "stories"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        timeout=120,
    )
    assert "2 passed, 1 rerun" in done.stdout, done.stdout + done.stderr
