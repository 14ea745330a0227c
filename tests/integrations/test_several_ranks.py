"""Frameworks with several ranks, stopped by a signal to one of them: together the attempts are an
undisturbed run, on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIGHTNING, STOCK, SHARDED = "lightning_ranks.py", "stock_ranks.py", "transformers_ranks.py"
STOPPED = 75
SAMPLES = 67
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("program", "scene", "world", "stops"),
    [
        # with 3 ranks an order of sums matters: DDP has another one in its first step
        (LIGHTNING, "ddp", 3, "train:3@2"),
        pytest.param(LIGHTNING, "ddp", 3, "train:1@1 val:1@2 train:11@0", marks=LONG),
        pytest.param(LIGHTNING, "ddp", 2, "train:7@1 val:0@1", marks=LONG),
        (LIGHTNING, "fsdp", 2, "val:1@0"),
        pytest.param(LIGHTNING, "fsdp", 3, "train:1@1 train:7@2 val:1@1 train:13@0", marks=LONG),
        pytest.param(LIGHTNING, "fsdp grad_op", 2, "train:1@1 val:1@1 train:13@0", marks=LONG),
        pytest.param(LIGHTNING, "fsdp flat", 2, "train:1@1 val:1@1 train:13@0", marks=LONG),
        pytest.param(LIGHTNING, "fsdp2", 2, "train:1@1 val:1@0", marks=LONG),
        pytest.param(LIGHTNING, "fsdp2", 3, "train:1@1 train:7@2 val:1@1 train:13@0", marks=LONG),
        # which trains with FSDP2 what a Trainer that nobody stops would
        (SHARDED, "plain", 2, "step:3@1"),
        pytest.param(SHARDED, "plain", 2, "step:1@1 eval:1@0 step:6@1 eval:1@1", marks=LONG),
        pytest.param(SHARDED, "accumulated", 3, "step:1@2 step:5@0 eval:1@1", marks=LONG),
        pytest.param(STOCK, "accelerate_loop.py", 3, "2@1 3@2", marks=LONG),
        pytest.param(STOCK, "hf_causal_lm.py", 3, "2@1 3@2", marks=LONG),
    ],
)
def test_stopped_run_is_the_undisturbed_one(
    program: str, scene: str, world: int, stops: str, tmp_path: Path
) -> None:
    """Losses, logged means, and the weights."""
    ran = subprocess.run(
        [sys.executable, HERE / program, scene, str(world), tmp_path / "runs", *stops.split()],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["undisturbed_exits"] == [0] * world, ran.stderr
    assert found["stopped_exits"] == [*[STOPPED] * world * len(stops.split()), *[0] * world]
    assert found["stopped"] == found["undisturbed"]
    assert len(found["stopped"]) > 10


@pytest.mark.parametrize(
    "attempts", [["2:2", "1:7", "3:"], pytest.param(["1:2", "3:4", "2:"], marks=LONG)]
)
def test_an_epoch_goes_on_with_another_number_of_ranks(attempts: list[str], tmp_path: Path) -> None:
    """The rest of an epoch is more batches for fewer ranks: Lightning trains all of them, validates
    behind them, and the next epoch is whole."""
    ran = subprocess.run(
        [sys.executable, HERE / "lightning_resized.py", tmp_path, *attempts],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    ranks = [int(one.partition(":")[0]) for one in attempts]
    assert found["exits"] == [[STOPPED] * n for n in ranks[:-1]] + [[0] * ranks[-1]], ran.stderr
    for epoch in (0, 1):
        notes = [(kind, what) for of, kind, what in found["notes"] if of == epoch]
        trained = Counter(place for kind, what in notes if kind == "trained" for place in what)
        once = dict.fromkeys(range(SAMPLES), 1)
        assert {place: n for place, n in trained.items() if place < SAMPLES} == once
        assert sum(kind == "validated" for kind, _ in notes) == ranks[-1]
