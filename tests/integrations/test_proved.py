"""Scripts of people who know nothing of hydroslurm, put to the proof by ``hydroslurm prove``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hydroslurm.prove.trial import Proof

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"


@pytest.mark.parametrize(
    "command",
    [
        "lightning_digits.py --epochs 1 --workers 2",
        "lightning_digits.py --epochs 1 --workers 0 --accumulate 4",
        "fabric_digits.py",
        "hf_causal_lm.py out --epochs 2 --workers 2",
    ],
)
def test_the_same_bits(preemptible_training: Callable[..., Proof], command: str) -> None:
    """Stopped within the first steps, as Slurm does it; the second stop may come too late."""
    script, *arguments = command.split()
    proof = preemptible_training(str(SCRIPTS / script), *arguments, steps=18, stops=2)
    assert str(proof).startswith("the same bits: 18 steps, ")
    assert proof.stops[0].status == 75
