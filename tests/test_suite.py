"""What a run of the suite leaves out, and what it says at its end."""

from __future__ import annotations

import re
import sys
import zlib
from pathlib import Path

import pytest
from processes import captured
from suite import TENTHS, _tenth

TESTS = """
import pytest
import suite

suite.BUDGET_S = 0.0
RUNS = {}


@pytest.mark.parametrize("number", range(40))
@pytest.mark.long
def test_long(number):
    assert number >= 0


@pytest.mark.parametrize("number", range(2))
def test_fails_once(number):
    RUNS[number] = RUNS.get(number, 0) + 1
    assert RUNS[number] == 2, f"run {RUNS[number]} of {number}"
"""


def _run(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = long\n")
    (folder / "test_few.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "suite", "-p", "no:cacheprovider", "-q"]
    ended = captured([*command, "--reruns", "1", *options], cwd=folder, timeout=120)
    return ended.returncode, ended.stdout


def test_ten_commits_in_a_row_have_the_ten_turns(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    captured(["git", "init", "-q"], cwd=tmp_path, timeout=60)
    turns = []
    for number in range(TENTHS):
        commit = [*git, "commit", "-q", "--allow-empty", "-m", str(number)]
        captured(commit, cwd=tmp_path, timeout=60)
        turns.append(_tenth(tmp_path))
    assert sorted(turns) == list(range(TENTHS))


def test_each_long_test_has_one_turn_and_reruns_are_explained_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    status, said = _run(tmp_path, "--long=tenth", "--most-repeated", "2", "-rp")
    first = (_tenth(tmp_path) - zlib.crc32(b"test_few.py")) % TENTHS
    mine = range(first, 40, TENTHS)
    assert status == 0, said
    assert [f"test_long[{n}]" for n in mine] == re.findall(r"PASSED .*::(test_long.*)", said)
    assert f"{40 - len(mine)} deselected" in said
    assert "test_few.py::test_fails_once[1] (call): AssertionError: run 1 of 1" in said
    assert ".  past its budget of 0 s" in said
    status, said = _run(tmp_path, "--most-repeated", "1")
    assert (status, "40 deselected" in said) == (1, True), said
    assert "2 tests needed a rerun; 1 may" in said
