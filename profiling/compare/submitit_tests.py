"""Run submitit's own tests of Slurm and of its AutoExecutor with our executor in place of theirs.

    python profiling/compare/submitit_tests.py            # what differs is listed with reasons
    python profiling/compare/submitit_tests.py -k array   # arguments are pytest's

submitit's wheel brings its tests. They run in a copy of the package, in a temporary folder, because
one of them writes beside itself. This file is the plugin of pytest that puts ours in their place.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitit.core.utils import environment_variables

TESTS = ("slurm/test_slurm.py", "auto/test_auto.py")
DIFFERENT = {
    "test_requeuing_not_checkpointable": (
        "a time limit ends what has no checkpoint() there; here it runs again, max_num_timeout "
        "times, because its Run may not have been there yet"
    ),
    **dict.fromkeys(
        (r"test_slurm_weird_dir[a\\=0]", r"test_slurm_weird_dir[a\\=]"),
        "Slurm reads a backslash in the name of a log file as something else; refused here",
    ),
}
"""Test -> why ours does not pass it, and is not to."""


def main(arguments: list[str]) -> int:
    """The exit status of pytest."""
    found = importlib.util.find_spec("submitit")
    if found is None or found.origin is None:
        raise SystemExit("submitit is not installed here")
    package = Path(found.origin).parent
    missing = [test for test in TESTS if not (package / test).is_file()]
    if missing:
        raise SystemExit(f"{package} has no {', '.join(missing)}; wanted a submitit with its tests")
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "submitit"
        shutil.copytree(package, copy)
        paths = [temporary, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        options = ["-p", Path(__file__).stem, "-p", "no:cacheprovider", "-rfEx", "--tb=short", "-q"]
        tests = [str(copy / test) for test in TESTS]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests, *arguments],
            cwd=temporary,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
    return done.returncode


def pytest_configure() -> None:
    """pytest's hook, before the tests are imported."""
    from submitit.core import test_core
    from submitit.slurm import slurm

    from hydroslurm.jobs.launch.executor import Executor, PausableJob

    slurm.SlurmExecutor, slurm.SlurmJob = Executor, PausableJob
    test_core.MockedSubprocess.job_context = _as_slurm_sets_it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pytest's hook: what has to differ is expected to."""
    for item in items:
        if item.name in DIFFERENT:
            item.add_marker(pytest.mark.xfail(reason=DIFFERENT[item.name], strict=True))


@contextlib.contextmanager
def _as_slurm_sets_it(_: object, job_id: str) -> Iterator[None]:
    """The environment of a rank. submitit's mock has SLURM_JOB_ID=12_0 for a task of an array,
    which no Slurm sets, and a rank of ours refuses."""
    array, _, task = job_id.partition("_")
    names = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": array, "_USELESS_TEST_ENV_VAR_": "1"}
    if task:
        names |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task}
    with environment_variables(**names):
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
