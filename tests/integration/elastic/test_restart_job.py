"""Elastic jobs on a real Slurm whose members are agents that start their ranks anew."""

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


def submitted(cluster: DevCluster, folder: Path, script: str, **options: object) -> ElasticScene:
    scene = ElasticScene(cluster, folder)
    scene.folder.mkdir()
    (scene.folder / "train.py").write_text(script)
    shutil.copy(NOTES, scene.folder)
    told = json.dumps({"folder": str(scene.folder), **options})
    return scene.submit_elastic(script=f"train.py, '{told}'", engine="restart", size=2)


def test_any_script_may_be_elastic(requeue_cluster: DevCluster, tmp_path: Path) -> None:
    """Members that are preempted, or whose rank is killed, are replaced; the others keep their
    jobs, and a failure is charged to the member and the node where it was. Nothing is left."""
    scene = submitted(requeue_cluster, tmp_path / "job", LIGHT)
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
    told = described.stdout
    assert "Engine:       restart" in told, described.stderr
    assert "1 preempted, 1 failed" in told

    (scene.folder / "finish").touch()
    scene.assert_it_ends_well()
