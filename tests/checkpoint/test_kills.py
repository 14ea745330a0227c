"""SIGKILL at every I/O call of a save, and at any moment: the newest committed one always loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from zygote import forked_program

KILLING = Path(__file__).with_name("killing.py")

# together more than 200; a save that makes fewer calls must have lost an fsync somewhere
LEAST_KILLS = {"save": 50, "save_and_prune": 48, "link": 50}


def run(folder: Path, *arguments: str) -> int:
    """How many kills the program counts."""
    with forked_program(KILLING, folder, str(folder / "checkpoints"), *arguments) as program:
        done = int(program.expect("done", limit_s=150))
        assert program.wait() == 0
    return done


@pytest.mark.parametrize("way", LEAST_KILLS)
def test_killed_at_every_call(quick_folder: Path, way: str) -> None:
    """After a SIGKILL at each single call, the old or the new state loads bit for bit, and the next
    save works."""
    assert run(quick_folder, "calls", way) >= LEAST_KILLS[way]


def test_killed_at_any_moment(quick_folder: Path) -> None:
    """A process that saves without pause and is killed at random loses nothing it committed, and
    its leftovers are removed."""
    assert run(quick_folder, "moments", "25", "7") == 25
