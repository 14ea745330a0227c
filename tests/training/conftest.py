"""Fixtures of the session's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hydroslurm


@pytest.fixture(autouse=True)
def _nothing_stays_installed() -> Iterator[None]:
    """A test that fails must not take the next ones with it."""
    yield
    if hydroslurm.is_installed():
        hydroslurm.uninstall()
