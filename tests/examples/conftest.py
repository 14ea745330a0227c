"""Fixtures of the examples' tests: the examples are run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from processes import patience

LIMIT_S = 120


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository."""
    return Path(__file__).resolve().parents[2]


Run = Callable[..., str]


@pytest.fixture(scope="session")
def run(root: Path) -> Run:
    """Run an example to its end and return what it printed; warnings are errors."""

    def run_example(name: str, *options: str, environ: Mapping[str, str] | None = None) -> str:
        command = [sys.executable, "-W", "error", str(root / "examples" / name), *options]
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience(LIMIT_S),
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run_example
