"""Dev clusters that the tests of one session share. Without Slurm their tests are skipped, or fail
with ``HYDROSLURM_REQUIRE_SLURM=1`` in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hydroslurm.devcluster import ClusterSpec, DevCluster, cgroups
from hydroslurm.devcluster.programs import missing, missing_message, search_path
from hydroslurm.errors import ClusterError

REQUIRE_ENV = "HYDROSLURM_REQUIRE_SLURM"


def require_slurm() -> None:
    """Skip the test, or fail it, unless everything that a dev cluster needs is installed."""
    absent = missing(search_path(os.environ.get("PATH")))
    if not absent:
        return
    message = f"a real Slurm is needed; {missing_message(absent)}"
    if os.environ.get(REQUIRE_ENV) == "1":
        pytest.fail(f"{message} ({REQUIRE_ENV}=1 makes this a failure)", pytrace=False)
    pytest.skip(message)


def require_cgroups(spec: ClusterSpec) -> None:
    """Skip the test where this user or this machine can have no such cluster: nothing that could be
    installed would help."""
    require_slurm()
    try:
        cgroups.require(spec)
    except ClusterError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cgroup_cluster() -> Iterator[DevCluster]:
    """A cluster of three nodes with ``proctrack/cgroup`` and memory that is counted, whose ``low``
    jobs are requeued by ``urgent`` ones."""
    spec = ClusterSpec(
        nodes=3, profile="requeue", kill_wait_s=30, proctrack="cgroup", constrain_memory=True
    )
    require_cgroups(spec)
    yield from _cluster(spec)


@pytest.fixture(scope="session")
def pause_cluster() -> Iterator[DevCluster]:
    """A cluster of three nodes whose ``low`` jobs are suspended by ``urgent`` ones."""
    yield from _cluster(ClusterSpec(nodes=3, profile="pause", kill_wait_s=5))


@pytest.fixture(scope="session")
def requeue_cluster() -> Iterator[DevCluster]:
    """A cluster of two nodes whose ``low`` jobs are requeued by ``urgent`` ones."""
    yield from _cluster(ClusterSpec(nodes=2, profile="requeue", kill_wait_s=5))


@pytest.fixture(scope="session")
def gang_requeue_cluster() -> Iterator[DevCluster]:
    """A cluster of two nodes whose ``low`` jobs are requeued by gang scheduling, without grace."""
    yield from _cluster(ClusterSpec(nodes=2, profile="gang-requeue", kill_wait_s=5))


@pytest.fixture(scope="session")
def ranks_cluster() -> Iterator[DevCluster]:
    """A cluster of 19 nodes for several jobs of several nodes side by side, whose ``low`` jobs are
    requeued by ``urgent`` ones."""
    yield from _cluster(ClusterSpec(nodes=19, profile="requeue", kill_wait_s=10))


def _cluster(spec: ClusterSpec) -> Iterator[DevCluster]:
    require_slurm()
    with DevCluster.up(spec) as cluster:
        yield cluster
