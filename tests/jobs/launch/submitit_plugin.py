"""A plugin of pytest for submitit's own tests: puts our executor in place of theirs."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitit.core import utils
from submitit.core.utils import environment_variables

DIFFERENT = {
    "test_requeuing_not_checkpointable": (
        "a time limit ends what has no checkpoint() there; here it runs again, max_num_timeout "
        "times, because its Run may not have been there yet"
    ),
    **dict.fromkeys(
        (r"test_slurm_weird_dir[a\\=0]", r"test_slurm_weird_dir[a\\=]"),
        "Slurm reads a backslash in the name of a log file as something else; refused here",
    ),
    **dict.fromkeys(
        ("test_slurm_job_array_mocked[False]", "test_slurm_job_array_mocked[True]"),
        "its last line reads the batch script beside the run folders; here it is in the job's own",
    ),
}
"""Test -> why ours does not pass it, and is not to."""


def pytest_configure() -> None:
    """pytest's hook, before the tests are imported."""
    from submitit.core import test_core
    from submitit.slurm import slurm

    from hydroslurm.jobs.launch import sbatch
    from hydroslurm.jobs.launch.executor import Executor, PausableJob

    sbatch.sbatch = _sbatch
    slurm.SlurmExecutor, slurm.SlurmJob = Executor, PausableJob
    test_core.MockedSubprocess.job_context = _as_slurm_sets_it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pytest's hook: what has to differ is expected to."""
    for item in items:
        if item.name in DIFFERENT:
            item.add_marker(pytest.mark.xfail(reason=DIFFERENT[item.name], strict=True))


def _sbatch(script: Path) -> subprocess.CompletedProcess[str]:
    """What submitit's tests have in the place of sbatch; it answers in other words than Slurm's."""
    said = utils.CommandFunction(["sbatch", str(script)])().decode()
    return subprocess.CompletedProcess([], 0, said.replace("Running", "Submitted batch"), "")


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
