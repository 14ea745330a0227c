"""An elastic job on a real Slurm through all that happens to it, for members that train in place,
and for those that are agents, which start their ranks again."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from integration.elastic.elastic_scene import ElasticScene
from restartstory import LIGHT, NOTES, said

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
    scaled = scene.hydroslurm("scale", str(scene.job_id), "3")
    assert scaled.returncode == 0, scaled.stderr
    scene.wait_for_size(3)
    newest = scene.extra[-1]

    scene.slurm("scancel", newest)  # as a preemption: SIGTERM, then SIGKILL
    ended = scene.wait_for("ended")
    assert (ended["member"], ended["how"]) == (newest, "preemption")
    scene.wait_for_size(3, without=newest)
    changes = scene.entries("generation")
    assert base in scene.members
    assert [one["steps_lost"] for one in changes] == [0] * len(changes)

    told = scene.hydroslurm("describe", str(scene.job_id)).stdout
    assert "3 train, 3 are wanted, 1 to 3 are allowed" in told
    assert f"left: {newest}" in told
    assert "1 preempted, 0 failed" in told
    told = scene.hydroslurm("status", base).stdout
    assert f"Member:       {base}  Running on " in told
    assert f"hydroslurm describe {scene.job_id}\n" in told
    assert "3 train, 3 are wanted" in told
    assert f"Member:       {base}  Running on " in scene.hydroslurm("describe", base).stdout

    scene.finish()


@pytest.mark.long
def test_any_script_may_be_elastic(requeue_cluster: DevCluster, tmp_path: Path) -> None:
    """Members that are preempted, or whose rank is killed, are replaced; the others keep their
    jobs, and a failure is charged to the member and the node where it was. Nothing is left."""
    scene = ElasticScene(requeue_cluster, tmp_path / "job")
    scene.folder.mkdir()
    (scene.folder / "train.py").write_text(LIGHT)
    shutil.copy(NOTES, scene.folder)
    told = json.dumps({"folder": str(scene.folder)})
    scene.submit_elastic(script=f"train.py, '{told}'", engine="restart")
    scene.wait_for_size(2)
    (base,) = scene.base
    (taken,) = scene.extra
    scene.wait(lambda: said(scene.folder, "began", member=taken), f"a rank of {taken}")
    scene.slurm("scancel", taken)
    ended = scene.wait_for("ended")
    assert (ended["member"], ended["how"]) == (taken, "preemption")
    scene.wait_for_size(2, without=taken)
    assert len(said(scene.folder, "stopped")) >= 2

    (failed,) = scene.extra
    scene.wait(lambda: said(scene.folder, "began", member=failed), f"a rank of {failed}")
    os.kill(said(scene.folder, "began", member=failed)[-1]["pid"], signal.SIGKILL)
    ended = scene.wait_for("ended", 2)
    assert (ended["member"], ended["how"]) == (failed, "failure")
    assert "was killed by SIGKILL" in ended["reason"]
    scene.wait_for_size(2, without=failed)
    assert base in scene.members
    described = scene.hydroslurm("describe", str(scene.job_id))
    assert "Engine:       restart" in described.stdout, described.stderr
    assert "1 preempted, 1 failed" in described.stdout

    (scene.folder / "finish").touch()
    scene.assert_it_ends_well()
