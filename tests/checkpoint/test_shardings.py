"""What 4 ranks have saved is loaded by 1, 2, 3 and 4, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Child
from zygote import forked_program

PROGRAM = Path(__file__).with_name("shardings.py")


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """The process from which ranks are forked."""
    with forked_program(PROGRAM, tmp_path_factory.mktemp("shardings")) as program:
        program.expect("ready", limit_s=240)
        yield program


@pytest.mark.parametrize("case", ["ddp", "fsdp", "uneven", "hsdp", "fsdp_tp"])
def test_with_another_number_of_ranks(checker: Child, quick_folder: Path, case: str) -> None:
    """Model and optimizer come back whole and in shards of any layout, and train on."""
    begin = len(checker.lines)
    checker.say(f"{quick_folder} {case}")
    assert checker.expect("ended", limit_s=240) == "0", checker
    said = [line for line in checker.lines[begin:] if line.startswith("loaded by")]
    assert said == [f"loaded by {ranks}" for ranks in (1, 2, 3, 4)]
