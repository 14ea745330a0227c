"""What is said of job specs that are none. Each file in broken/ has its answer beside it; after a
change read what `python tests/jobs/spec/test_broken.py` writes, as its user would."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

import pytest

from hydroslurm.errors import SpecError
from hydroslurm.jobs.spec.reading import load

FOLDER = Path(__file__).with_name("broken")
SPECS = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def answer(name: str) -> str:
    with contextlib.chdir(FOLDER) if sys.version_info >= (3, 11) else _chdir(FOLDER):
        try:
            load(Path(f"{name}.yaml"))
        except SpecError as error:
            return f"{error}\n"
    return "it is a job spec\n"


@contextlib.contextmanager
def _chdir(folder: Path):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", SPECS)
def test_the_message_names_field_line_and_fix(name: str) -> None:
    """Every problem of a spec is said at once, in the message that are recorded."""
    assert answer(name) == (FOLDER / f"{name}.txt").read_text()


def test_there_are_enough() -> None:
    """Thirty of them, none without a line number but those that have no lines."""
    assert len(SPECS) >= 30
    for name in SPECS:
        told = (FOLDER / f"{name}.txt").read_text()
        assert name == "01-empty" or re.search(rf"{name}\.yaml:[0-9]+: ", told)


if __name__ == "__main__":
    for spec in SPECS:
        (FOLDER / f"{spec}.txt").write_text(answer(spec))
