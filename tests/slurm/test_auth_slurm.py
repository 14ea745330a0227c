"""A cluster whose Slurm proves identities by itself (AuthType=auth/slurm), where no munged runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from clusters import require_slurm
from integration.manyranks.rankstraining import RanksTraining

from hydroslurm.core.events import EventKind
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.devcluster.programs import find_programs, search_path
from hydroslurm.errors import ClusterError
from hydroslurm.slurm.spank.build import slurm_release

pytestmark = [pytest.mark.slurm, pytest.mark.slurms]

RANKS = range(2)


def test_ranks_of_two_nodes_park_and_save_together(tmp_path: Path) -> None:
    """They have their key from a file in the run folder: all are parked with nothing in flight,
    save behind one step at a requeue, and the next attempt goes on from there."""
    require_slurm()
    spec = ClusterSpec(nodes=2, cpus_per_node=1, profile="requeue", auth="slurm")
    sinfo = find_programs(search_path(os.environ.get("PATH")))["sinfo"]
    if slurm_release(sinfo, os.environ) < (23, 11):
        with pytest.raises(ClusterError, match=r"auth/slurm needs Slurm 23\.11 or newer"):
            DevCluster.up(spec)
        return
    with DevCluster.up(spec) as cluster:
        assert "munged" not in [daemon.name for daemon in cluster.status().daemons]
        training = RanksTraining(cluster, tmp_path / "training", epochs=2, world=2, nodes=2)
        training.submit()
        training.wait_for_ranks(1)
        training.suspend(1, until_stopped=True)
        training.requeue()
        training.wait_for_end()

    for rank in RANKS:
        (parked,) = training.events_of(rank, EventKind.ALL_PARKED, attempt=1)
        assert parked.data["in_flight"] == 0
        (agreed,) = training.events_of(rank, EventKind.STOP_AGREED, attempt=1)
        assert agreed.rank == rank
    first, second = training.attempts()
    assert second.step == first.end_step
