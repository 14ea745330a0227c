"""Fixtures of the tests of jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put fake programs of Slurm first on the PATH: `programs(sbatch="echo 41")`. Their folder."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def write(**scripts: str) -> Path:
        for name, script in scripts.items():
            path = folder / name
            path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        return folder

    return write
