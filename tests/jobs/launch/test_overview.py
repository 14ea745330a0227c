"""What describe concludes from the attempts of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydroslurm.core.rundir import RunDir
from hydroslurm.jobs.control.overview import Overview
from hydroslurm.jobs.spec.reading import loads
from hydroslurm.jobs.supervisor.attempts import Attempt, Ending

SPEC = """
runPolicy: {backoffLimit: 0}
replicaSpecs: [{type: worker, template: {command: [python, train.py]}}]
"""


@pytest.mark.parametrize(
    ("endings", "restarts"),
    [
        ([], 0),
        ([None], 0),
        ([Ending.FAILED], 0),
        ([Ending.FAILED, Ending.SUCCEEDED], 1),
        ([Ending.FAILED, Ending.RESTARTED, Ending.FAILED], 2),
        ([Ending.PREEMPTED, Ending.LOST, None], 0),
    ],
)
def test_only_a_failure_that_was_followed_by_a_start_is_a_restart(
    endings: list[Ending | None], restarts: int, tmp_path: Path
) -> None:
    """A job that failed once and was given up has had no restart."""
    found = Overview(
        run=RunDir(tmp_path),
        slurm=None,
        conditions=(),
        job=loads(SPEC, name="job.yaml", folder=tmp_path).job,
        plan=None,
        attempts=tuple(Attempt(n, 0, n, ending=ending) for n, ending in enumerate(endings, 1)),
        tensorboard=None,
    )
    assert found.restarts == restarts
