"""T9k's manifest runs to its end with four ranks. On a real Slurm."""

from __future__ import annotations

import re

import pytest
from integration.trainingjob.scene import Scene

from hydroslurm.core.events import EventKind, read_events

pytestmark = pytest.mark.slurm


def trained(scene: Scene) -> list[tuple[str, ...]]:
    """What each of the four ranks says: rank, world size, accuracy, weights."""
    texts = [scene.printed(task) for task in range(4)]
    found = [
        re.search(r"rank (\d) of (\d), local 0: accuracy (\S+), weights (\S+)", text)
        for text in texts
    ]
    assert all(found), texts
    return sorted(tuple(one.groups()) for one in found if one)


@pytest.mark.scene("manifest_torchrun")
def test_a_manifest_with_torchrun(scene: Scene) -> None:
    """As it is: four agents meet, although one would do, and four ranks train in the order of their
    replicas."""
    assert scene.final_condition().type == "Succeeded"
    assert all(f"rank {task} of 4" in scene.printed(task) for task in range(4))
    assert {rank for rank, *_ in trained(scene)} == {"0", "1", "2", "3"}
    assert len({rest for _, *words in trained(scene) for rest in [tuple(words)]}) == 1
    assert all("4 nodes meet at" in scene.printed(task) for task in range(4))


@pytest.mark.scene("manifest_srun")
def test_a_manifest_without_torchrun(scene: Scene) -> None:
    """One word changed: the same training, its ranks started by srun, behind the init container;
    they know each other by a key that no stranger has."""
    assert scene.final_condition().type == "Succeeded"
    assert {rank for rank, *_ in trained(scene)} == {"0", "1", "2", "3"}
    assert all(scene.printed(task).startswith("ready\n") for task in range(4))
    joined = [
        event.data["key_from"]
        for task in range(4)
        for event in read_events(scene.run.rank_events(task))
        if event.kind is EventKind.RANKS_JOINED
    ]
    assert joined == ["environment"] * 4


@pytest.mark.scene("manifest_srun")
def test_what_has_no_meaning_is_said_once(scene: Scene) -> None:
    """One warning at the submission lists what Slurm has no use for."""
    warning = scene.said.partition("no effect on this Slurm")[2]
    for field in ("priority", "volumes", "volumeMounts", "image pytorch/pytorch:2.0.0"):
        assert field in warning
    assert scene.said.count("no effect") == 1
