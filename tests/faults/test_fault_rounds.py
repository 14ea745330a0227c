"""Some of the rounds of ``run.py``, which plays hundreds."""

from __future__ import annotations

import pytest
from faults.plans import draw
from faults.rounds import Player

SEED = 7


def test_a_round_can_be_drawn_again() -> None:
    """A seed and a number give the same faults at any time, and another number gives others."""
    assert draw(SEED, 3) == draw(SEED, 3)
    assert draw(SEED, 3) != draw(SEED, 4)


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[pytest.mark.long] if number >= 4 else []) for number in range(24)],
)
def test_nothing_hangs_and_nothing_is_lost(number: int, player: Player) -> None:
    """Whatever is done to a run: no rank hangs, what was committed is there and whole, the next
    attempt goes on from it, and the end has the bits of the run that was left alone."""
    outcome = player.play(draw(SEED, number))
    assert not outcome.complaints, f"{outcome.plan}\n{outcome.complaints}\n{outcome.said}"
