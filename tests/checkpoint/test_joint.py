"""Saves of several ranks, killed, broken or given up anywhere: there is one outcome for all."""

from __future__ import annotations

from pathlib import Path

import pytest
from zygote import forked_program

PROGRAM = Path(__file__).with_name("jointly.py")


def run(folder: Path, scene: str) -> int:
    """How many rounds the scene counts."""
    with forked_program(PROGRAM, folder, str(folder), scene) as running:
        done = int(running.expect("done", limit_s=180))
        assert running.wait() == 0
    return done


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_every_call(quick_folder: Path, rank: int) -> None:
    """After a SIGKILL of one rank at an I/O call the old or the new state is there, whole, and all
    survivors say the same, and what is true."""
    assert run(quick_folder, f"calls_of_rank_{rank}") >= 11


def test_killed_at_agreements(quick_folder: Path) -> None:
    """A rank killed before or after any agreement: once all have written, the checkpoint is
    committed whoever dies."""
    assert run(quick_folder, "kills_at_agreements") == 18


def test_superseded(quick_folder: Path) -> None:
    """A newer attempt claims at any call of a joint save: all ranks hear of it, and nothing is
    committed behind its back."""
    assert run(quick_folder, "superseded") >= 20


def test_one_broken_disk(quick_folder: Path) -> None:
    """When one rank cannot write, all of them fail, and what was committed before is whole."""
    assert run(quick_folder, "broken_disks") >= 20


@pytest.mark.parametrize(
    "scene",
    [
        "two_deaths",
        "few_committers",
        "given_up",
        "leftovers",
        "patience",
        "unlike",
        "savers",
        "savers_apart",
        "savers_without_memory",
        "savers_without_one",
    ],
)
def test_scene(quick_folder: Path, scene: str) -> None:
    """What the scene's docstring says."""
    assert run(quick_folder, scene) == 1


def test_all_choose_the_same(quick_folder: Path) -> None:
    """The newest good checkpoint is agreed on; one damaged byte in any file is found by the ranks
    together, and costs one warning and a fallback."""
    assert run(quick_folder, "choosing") == 12  # files
