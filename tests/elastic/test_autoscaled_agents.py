"""A rule of a spec, an autoscaler, and agents that grow and shrink by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import wait_until
from restartstory import TRAIN, RestartStory

from hydroslurm.elastic.autoscale import FEWEST_PER_SIZE
from hydroslurm.elastic.autoscaler import read_observations
from hydroslurm.jobs.launch.elastic_job import autoscale_of
from hydroslurm.jobs.spec.reading import loads

SPEC = """
replicaSpecs: [{template: {command: [python, train.py]}}]
elastic:
  min: 1
  max: 2
  engine: restart
  autoscale:
    efficiency: 0.3
    scaleUp: {stabilizationWindowSeconds: 0, cooldownSeconds: 0}
    scaleDown: {stabilizationWindowSeconds: 0, cooldownSeconds: 0}
"""


@pytest.mark.elastic
@pytest.mark.parametrize("pays", [True, False])
def test_a_second_member_stays_if_it_pays(tmp_path: Path, pays: bool) -> None:
    """It is taken in once the pace of the first is known, and sent away when it slows the steps
    down so much that both together train less; what the ranks tell with their heartbeats, and the
    ledger has the figures of the decision."""
    job = loads(SPEC, name="job.yaml", folder=tmp_path).job
    assert job.elastic is not None
    rules = autoscale_of(job, job.elastic)
    assert rules is not None
    story = RestartStory(
        tmp_path,
        script=TRAIN,
        **{"min": 1, "max": 2, "wanted": 1, "observe_s": 2.0},
        autoscale=rules.to_json(),  # type: ignore[arg-type]
    )

    def seen(size: int) -> int:
        told = [one for one in read_observations(story.folder) if one.samples_per_s]
        return sum(one.size == size for one in told)

    try:
        story.start("a", epochs=1000, step_s=0.1, heartbeat_s=1.0)
        story.wait_for("generation")
        story.start("b", epochs=1000, step_s=0.1 if pays else 0.4, heartbeat_s=1.0)
        grown = story.wait_for("wanted")
        assert grown["size"] == 2
        assert grown["by"] == "autoscaler: as many as may be"
        assert seen(1) >= FEWEST_PER_SIZE
        story.wait_for_step("b", size=2)
        if pays:
            wait_until(lambda: seen(2) > FEWEST_PER_SIZE, lambda: f"paces of two\n{story}")
            assert len(story.entries("wanted")) == 1, story
            return
        shrunk = story.wait_for("wanted", 2)
        assert shrunk["size"] == 1
        assert "the last of 2 members brings -" in shrunk["by"]
        assert story.members["b"].wait() == 0, story
        story.wait_for("generation", 3)
        assert story.status()["size"] == 1
        assert [one["steps_lost"] for one in story.entries("resumed")][:2] == [0, 0]
    finally:
        story.close()
