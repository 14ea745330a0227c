"""A site's limits are met before anything is submitted, with Slurm's own words."""

from __future__ import annotations

from pathlib import Path

import pytest
from clusters import require_slurm
from integration.elastic.elastic_scene import ElasticScene

from hydroslurm.devcluster import ClusterSpec, DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]
LIMITED = """\
AccountingStorageEnforce=limits
MaxArraySize=8
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


@pytest.fixture(scope="module")
def limited():
    """A cluster whose limits count, and an array of 8 elements at most."""
    require_slurm()
    with DevCluster.up(ClusterSpec(nodes=4, cpus_per_node=4, partitions=LIMITED)) as running:
        yield running


def submitted(scene: ElasticScene, *, size: int, max: int) -> tuple[int, str]:
    """The status of `hydroslurm submit` and its words; nothing is left of what was refused."""
    scene.write_spec(base=False, size=size, max=max)
    done = scene.hydroslurm("submit", "job.yaml")
    if done.returncode:
        assert not scene.slurm("squeue", "--noheader", "--format=%i").split()
        assert {one.name for one in scene.folder.iterdir()} == {"job.yaml", "member.py"}
    return done.returncode, done.stdout + done.stderr


def test_a_limit_is_named_before_anything_is_submitted(limited: DevCluster, tmp_path: Path) -> None:
    """Of the user's jobs in a QOS, of an array's elements; a larger `max` is a note only."""
    scene = ElasticScene(limited, tmp_path / "job")
    scene.slurm("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxSubmitJobsPerUser=5")
    status, said = submitted(scene, size=4, max=4)
    assert status != 0
    assert "QOSMaxSubmitJobPerUserLimit" in said
    assert "lower elastic.size or spares" in said
    status, said = submitted(ElasticScene(limited, tmp_path / "array"), size=9, max=9)
    assert status != 0
    assert "MaxArraySize" in said
    status, said = submitted(ElasticScene(limited, tmp_path / "more"), size=3, max=4)
    assert status == 0, said
    assert "4 members may be too many here" in said
    scene.slurm("scancel", *scene.slurm("squeue", "--noheader", "--format=%i").split())
