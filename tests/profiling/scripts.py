"""Runs a profiling script as a person would, and reads the JSON of its last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROFILING = Path(__file__).resolve().parents[2] / "profiling"
LIMIT_S = 400.0


def run_script(
    script: str, *options: str, folder: Path | None = None
) -> tuple[dict[str, Any], list[str]]:
    """``--quick``: the result, and the lines before it.

    Args:
        folder: that it writes to; nothing stays in it.
    """
    done = subprocess.run(
        [sys.executable, str(PROFILING / script), "--quick", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", **({"TMPDIR": str(folder)} if folder else {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *before, last = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(last)
    assert (result["script"], result["quick"]) == (script, True)
    assert {"date", "python", "torch", "cpu_count"} <= set(result["environment"])
    if folder is not None:
        left = {path.name for path in folder.iterdir() if path.name.startswith("hydroslurm-")}
        left.discard(f"hydroslurm-{os.getuid()}")  # the user's own folder for temporary files
        assert not left, "nothing stays of a run"
    return result, before
