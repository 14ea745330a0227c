"""Saves of one rank and of several, killed, broken or given up anywhere: one outcome for all."""

from __future__ import annotations

from pathlib import Path

import pytest
from zygote import forked_program

PROGRAM = Path(__file__).with_name("jointly.py")

SCENES = {
    # a save that makes fewer calls must have lost an fsync somewhere
    "kills_alone": 60,
    "kills_at_calls": 30,
    "kills_at_agreements": 18,
    "superseded": 35,
    "broken_disks": 12,
    "deaths": 2,
    "told_why": 5,
    "leftovers": 1,
    "savers": 1,
    "savers_apart": 1,
    "savers_without_memory": 1,
    "choosing": 1,
}
"""With the rounds that each counts, at least."""


@pytest.mark.parametrize("scene", SCENES)
def test_scene(quick_folder: Path, scene: str) -> None:
    """What the scene's docstring says, in jointly.py: after each fault the old or the new state is
    there, whole, and all survivors say the same, and what is true."""
    with forked_program(PROGRAM, quick_folder, str(quick_folder), scene) as running:
        assert int(running.expect("done", limit_s=180)) >= SCENES[scene]
        assert running.wait() == 0
