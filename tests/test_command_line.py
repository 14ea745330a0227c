"""What the command says of itself."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version


def test_version() -> None:
    """--version is answered at once, and is the installed one; the help is as ever."""

    def said(*words: str) -> str:
        command = [sys.executable, "-X", "importtime", "-m", "hydroslurm.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert "| torch\n" not in done.stderr
        return done.stdout

    assert said("--version") == f"hydroslurm {version('hydroslurm')}\n"
    assert "Make PyTorch training on Slurm preemptible" in said("--help")
