"""The profiling script of saves runs and prints what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "profiling" / "save.py"


def test_save(tmp_path: Path) -> None:
    """Every figure is there and positive, and nothing is left in the folder."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--json", "--directory", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["script"], result["quick"]) == ("save.py", True)
    assert 10e6 < result["state_bytes"] < 20e6
    for key in (
        "save_ratio_to_disk",
        "torch_save_ratio_to_disk",
        "stall_ratio_to_memcpy",
        "stop_to_durable_ms",
    ):
        assert result[key] > 0
    assert list(tmp_path.iterdir()) == []
