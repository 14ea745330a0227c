"""Fixtures of the TrainingJobs on a real Slurm.

The jobs run side by side, so many at a time, from the first test on that looks at one. Only those
that are asked for run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from clusters import Part
from integration.trainingjob.scene import Scene
from integration.trainingjob.stage import SCENES
from stories import Stories, marked, result_of, stories

AT_A_TIME = 8
ENDS_WITHIN_S = 600.0


@pytest.fixture(scope="session")
def scenes(
    request: pytest.FixtureRequest, jobs_cluster: Part, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stories[Scene]]:
    """All that the tests of this session look at, under way."""
    wanted = marked(request)
    told = {
        name: functools.partial(act, jobs_cluster) for name, act in SCENES.items() if name in wanted
    }
    base = tmp_path_factory.mktemp("jobs")
    with stories(told, base, clusters=(jobs_cluster,), at_a_time=AT_A_TIME) as scenes:
        yield scenes


@pytest.fixture
def scene(request: pytest.FixtureRequest, scenes: Stories[Scene]) -> Scene:
    """The job that the test's mark names, ended."""
    return result_of(request, scenes, ENDS_WITHIN_S)
