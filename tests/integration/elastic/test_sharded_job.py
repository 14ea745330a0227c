"""A job on a real Slurm whose members shard their model over two ranks each."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path

import pytest
from elasticstory import SHARDED
from integration.elastic.elastic_scene import ElasticScene

from hydroslurm.devcluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_members_that_shard_are_replaced(requeue_cluster: DevCluster, tmp_path: Path) -> None:
    """One is preempted, of its successor one rank is killed: each is replaced, and all ranks end
    with the same weights."""
    scene = ElasticScene(requeue_cluster, tmp_path / "job")
    scene.folder.mkdir()
    (scene.folder / "train.py").write_text(textwrap.dedent(SHARDED))
    files = {name: str(scene.folder / name) for name in ("hurry", "saved")}
    told = json.dumps({"batches": 1200, **files})
    scene.submit_elastic(size=2, max=2, script=f"train.py, '{told}'", engine="in_place", tasks=2)
    scene.wait_for_size(2)
    (taken,) = scene.extra
    scene.slurm("scancel", taken)  # as a preemption: SIGTERM, then SIGKILL
    scene.wait(lambda: len(scene.members) == 2 and taken not in scene.members, "replacement")
    (killed,) = scene.extra
    ranks = [pid for name, pid in scene.member_processes(script="train.py") if name == killed]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    scene.wait(lambda: len(scene.members) == 2 and killed not in scene.members, "replacement")
    (scene.folder / "hurry").touch()
    assert scene.final_condition().type == "Succeeded"
    ends = [
        line
        for path in scene.run.logs.glob("member-*")
        for line in path.read_text().splitlines()
        if line.startswith("DONE ")
    ]
    assert len(ends) == 4
    assert len(set(ends)) == 1
    assert [one["how"] for one in scene.entries("ended")] == ["preemption", "failure"]
    scene.assert_nothing_is_left()
