"""What a GPU has to show, as far as it can be tried on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from profiling.scripts import PROFILING


@pytest.mark.long
@pytest.mark.timeout(1400)
def test_gpu_parts_on_a_cpu(tmp_path: Path) -> None:
    """Without a device every part runs as far as a CPU goes, and leaves its line in a few files."""
    done = subprocess.run(
        [PROFILING / "gpu.sh", "--dry"],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=1300,  # after the deadlines of its own
    )
    assert done.returncode == 0, done.stdout[-5000:] + (tmp_path / "log.txt").read_text()[-5000:]
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    parts = ["gate", "overhead", "run", "vacate", "launch_ahead", "host_reduce", "frameworks"]
    assert [line["part"] for line in lines] == [*parts, "marks", "ranks", "frozen"]
    for key in ("bits_equal_with_pauses", "bits_equal_after_stop", "bits_equal", "bits_equal_ddp"):
        assert [line[key] for line in lines if key in line] == [True]
    assert {one.name for one in tmp_path.iterdir()} == {"results.jsonl", "table.txt", "log.txt"}
