"""Lightning's fit, stopped at all kinds of places: the attempts together are an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCENES = Path(__file__).with_name("lightning_scenes.py")
STOPPED = 75
LONG = pytest.mark.frameworks


def play(scene: str, folder: Path, *stops: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, SCENES, scene, folder / "runs", *stops],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return {**json.loads(ran.stdout), "said": ran.stderr}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "stops"),
    [
        # in the sanity check, in validation, at the ends of epochs
        ("plain", "sanity train:0 train:10 val:1 epoch:0 val:0 epoch:2"),
        pytest.param("accumulate", "train:3 train:5 val:1 train:32", marks=LONG),
        ("stream", "train:2 train:10 val:1 train:32"),
        ("averaged", "train:3 val:0 train:20"),
        ("thaw", "train:3 train:14 val:1 train:28"),
        pytest.param("workers", "train:4 val:1 train:32", marks=LONG),
        pytest.param("max_steps", "train:5 train:10 train:21", marks=LONG),
        pytest.param("manual", "train:2 train:10 train:21", marks=LONG),
        pytest.param("several", "train:3 train:10 train:25", marks=LONG),
        pytest.param("scaled", "train:1 train:5 train:12 train:30", marks=LONG),
        pytest.param("swa", "train:3 train:11 train:30", marks=LONG),
        pytest.param("callbacks", "train:5 train:10 val:2", marks=LONG),
        *(
            pytest.param(*one, marks=LONG)
            for one in (
                ("fractions", "train:1 train:2 val:4 train:10 train:22"),
                ("half", "sanity train:0 train:4 val:0 train:9"),
                ("overfit", "train:1 train:2 val:0 train:5"),
                ("max_time", "train:3 train:10 train:30"),
                ("reload", "train:3 train:10 epoch:1"),
                ("patience", "train:0 train:1 train:2 train:3 val:3 train:7"),
            )
        ),
    ],
)
def test_stopped_run_is_the_undisturbed_one(scene: str, stops: str, tmp_path: Path) -> None:
    found = play(scene, tmp_path, *stops.split())
    assert found["undisturbed_exits"] == [0]
    assert found["stopped_exits"] == [*[STOPPED] * len(stops.split()), 0]
    assert found["stopped"] == found["undisturbed"]
    assert len(found["stopped"]) > 9
