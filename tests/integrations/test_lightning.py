"""Lightning's callback by both of its packages, and an epoch that other numbers of ranks share."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import zygote
from integrations.proofs import LIGHTNING

RESIZED = Path(__file__).with_name("lightning_resized.py")
STOPPED = 75
SAMPLES = 67


@pytest.mark.parametrize(
    "attempts", [["2:2", "1:7", "3:"], pytest.param(["1:2", "3:4", "2:"], marks=pytest.mark.long)]
)
def test_an_epoch_goes_on_with_another_number_of_ranks(attempts: list[str], tmp_path: Path) -> None:
    """The rest of an epoch is more batches for fewer ranks: Lightning trains all of them, validates
    behind them, and the next epoch is whole."""
    ran = zygote.ran([RESIZED, tmp_path, *attempts], loads=LIGHTNING)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    ranks = [int(one.partition(":")[0]) for one in attempts]
    assert found["exits"] == [[STOPPED] * n for n in ranks[:-1]] + [[0] * ranks[-1]], ran.stderr
    for epoch in (0, 1):
        notes = [(kind, what) for of, kind, what in found["notes"] if of == epoch]
        trained = Counter(place for kind, what in notes if kind == "trained" for place in what)
        once = dict.fromkeys(range(SAMPLES), 1)
        assert {place: n for place, n in trained.items() if place < SAMPLES} == once
        # by the ranks that ended the epoch: on a busy machine the stop may come behind its end
        assert sum(kind == "validated" for kind, _ in notes) in ranks[1:]
