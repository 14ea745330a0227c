"""Fixtures of the report's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydroslurm.core.rundir import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run folder without any event."""
    return RunDir(tmp_path / "run").create()
