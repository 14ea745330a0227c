"""One elastic job on a real Slurm through all that happens to it: preempted, scaled, its
coordinator killed, and finished."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.elastic.elastic_scene import ElasticScene

from hydroslurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm


def test_a_job_lives_through_preemption_scaling_and_its_coordinators_death(
    requeue_cluster: DevCluster, tmp_path: Path
) -> None:
    """The base member is never touched; no step is lost at a preemption; the preempted member is
    replaced by a fresh one at once; nothing is left at the end."""
    scene = ElasticScene(requeue_cluster, tmp_path / "job").submit_elastic()
    scene.wait_for_size(2)
    (base,) = scene.base

    scene.kill_coordinator()
    scene.wait(lambda: len(scene.entries("coordinator")) == 2, "second coordinator")
    assert scene.hydroslurm("scale", str(scene.job_id), "4").returncode == 1
    said = scene.hydroslurm("scale", str(scene.job_id), "3")
    assert said.returncode == 0, said.stderr
    scene.wait_for_size(3)
    newest = scene.extra[-1]

    scene.slurm("scancel", newest)  # as a preemption: SIGTERM, then SIGKILL
    ended = scene.wait_for("ended")
    assert (ended["member"], ended["how"]) == (newest, "preemption")
    scene.wait_for_size(3, without=newest)
    changes = scene.entries("generation")
    assert base in scene.members
    assert [one["steps_lost"] for one in changes] == [0] * len(changes)

    said = scene.hydroslurm("describe", str(scene.job_id)).stdout
    assert "3 train, 3 are wanted, 1 to 3 are allowed" in said
    assert f"left: {newest}" in said
    assert "1 preempted, 0 failed" in said
    said = scene.hydroslurm("status", base).stdout
    assert f"Member:       {base}  Running on " in said
    assert f"hydroslurm describe {scene.job_id}\n" in said
    assert "3 train, 3 are wanted" in said
    assert f"Member:       {base}  Running on " in scene.hydroslurm("describe", base).stdout

    scene.finish()
