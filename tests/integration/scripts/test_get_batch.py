"""A script with a ``get_batch()``, after the change that the documentation shows, is stopped and
resumed bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.scripts.with_diff import DOCS, changed

from hydroslurm.prove.trial import Proof

SCRIPT = Path(__file__).with_name("get_batch.py").read_text()
PAGE = "own-loop.md"


def test_the_change_is_small() -> None:
    """Eight lines at most, those that go counted too."""
    diff = re.search(r"^```diff\n(.*?)^```", (DOCS / PAGE).read_text(), flags=re.M | re.S)
    assert diff is not None
    assert sum(line[:1] in ("+", "-") for line in diff[1].splitlines()) <= 8


def test_changed_it_is_resumed(
    preemptible_training: Callable[..., Proof], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, accumulation, evaluations in the loop, and batches drawn from a memory-mapped
    file."""
    script = tmp_path / "train.py"
    script.write_text(changed(SCRIPT, PAGE))
    monkeypatch.chdir(tmp_path)
    proof = preemptible_training(str(script), steps=10, stops=2, seed=4)
    assert (proof.steps, [stop.status for stop in proof.stops]) == (10, [75, 75])
