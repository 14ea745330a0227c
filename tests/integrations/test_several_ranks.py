"""Frameworks with several ranks, stopped by a signal to one of them: together the attempts are an
undisturbed run, on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIGHTNING, STOCK = "lightning_ranks.py", "stock_ranks.py"
STOPPED = 75
LONG = pytest.mark.frameworks


@pytest.mark.slow
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
