"""Fixtures for all tests. The dev clusters come from the package's own pytest plugin."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["hydroslurm.devcluster.pytest_plugin"]

ROOT = Path(__file__).resolve().parent.parent

# a shell starts what it puts into the background with SIGINT ignored, and children inherit that:
# Ctrl-C could not be tested
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# a test machine has few cores; without this every child starts a pool of threads
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(autouse=True)
def _own_registry(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Keep the tests' processes out of the user's registry, the user's settings out of the tests,
    and what one test puts into the environment out of the next: a RANK that stays behind would make
    every later Run of this process wait for its peers."""
    before = dict(os.environ)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    for name in [
        n for n in os.environ if n.startswith("HYDROSLURM_") and n != "HYDROSLURM_REQUIRE_SLURM"
    ]:
        monkeypatch.delenv(name)
    yield
    monkeypatch.undo()
    for name in set(os.environ) - set(before):
        del os.environ[name]
