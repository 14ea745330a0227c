"""Fixtures of the checkpoints' tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """In memory where there is such a place: a SIGKILL leaves the page cache alone, so that a real
    disk would add nothing but waiting. What fsync is for, test_faults.py simulates."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    yield folder
    shutil.rmtree(folder)
