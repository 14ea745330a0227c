"""Fixtures for all tests. The dev clusters come from the package's own pytest plugin."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

pytest_plugins = ["clusters", "kit.terminal", "stories", "suite"]

ROOT = Path(__file__).resolve().parent.parent

# a shell starts what it puts into the background with SIGINT ignored, and children inherit that:
# Ctrl-C could not be tested
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# a test machine has few cores; without this every child starts a pool of threads
os.environ.setdefault("OMP_NUM_THREADS", "1")
# batch scripts find python3 and hydroslurm there, as in an environment that is activated
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))

# an example may take longer than 200 ms: the machine is shared, with another worker at least
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")

# every child reads children/sitecustomize.py; a worker of pytest-xdist has it from its parent
_children, _given = str(TESTS / "children"), os.environ.get("PYTHONPATH", "")
if _children not in _given.split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_children, _given)))


@pytest.fixture(autouse=True)
def _no_run_ends_with_the_tests() -> Iterator[None]:
    """A run that a test has finished in this process would be marked so at the end of all tests."""
    yield
    if (attempts := sys.modules.get("hydroslurm.training.attempts")) is not None:
        attempts._trained.clear()


@pytest.fixture(scope="session")
def native_compiler() -> list[str]:
    """The command of the C++ compiler that this machine has."""
    from hydroslurm.errors import NoCompiler
    from hydroslurm.gate.build import find_compiler

    try:
        return find_compiler(os.environ)
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``: who runs what."""
    from sidebyside import ByModule

    config.option.loadscopereorder = False
    return ByModule(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist: this is one of several
        from sidebyside import in_turn

        in_turn(items)


@pytest.fixture(scope="session")
def nsys() -> str:
    """NVIDIA's profiler. Where it is not installed the test is skipped, and fails where a missing
    Slurm is a failure: setup.sh brings both."""
    from clusters import REQUIRE_ENV

    from hydroslurm.report.nsys import find_nsys

    found = find_nsys()
    if found is None:
        words = "nsys is needed: on PATH, or by ./setup.sh on Debian"
        if os.environ.get(REQUIRE_ENV) == "1":
            pytest.fail(f"{words} ({REQUIRE_ENV}=1 makes this a failure)", pytrace=False)
        pytest.skip(words)
    return found


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
