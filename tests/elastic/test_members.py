"""Members come and go while the others train on, in the same processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic.story import SAMPLES, ElasticStory, times_seen

from hydroslurm.core.exitcodes import CANCELLED, RUN_AGAIN


@pytest.fixture
def story(tmp_path: Path) -> Iterator[ElasticStory]:
    one = ElasticStory(tmp_path)
    try:
        yield one
    finally:
        one.close()


def test_an_announced_leave_loses_nothing(story: ElasticStory) -> None:
    """A member that gets SIGTERM goes at a step that all agree on; no step is repeated, every
    sample comes once, and the others end with the same weights."""
    for name in "abcd":
        story.start(name)
    story.wait_for_step("a", size=4)
    story.signal("b", signal.SIGTERM)
    ends = {story.done(name)["weights"] for name in "acd"}
    assert story.members["b"].wait() in (RUN_AGAIN, CANCELLED)
    assert len(ends) == 1, story
    (first, second) = story.entries("generation")
    assert (first["ranks"], second["ranks"], second["left"]) == (4, 3, ["b"])
    assert second["steps_lost"] == 0
    assert set(second["members"]) == set("acd")
    for epoch, seen in times_seen(*map(story.steps, "abcd")).items():
        assert set(seen) == set(range(SAMPLES)), epoch


def test_a_killed_member_costs_the_step_in_flight_at_most(story: ElasticStory) -> None:
    """After SIGKILL of the first rank the others repeat at most one step, in the same processes."""
    for name in "abc":
        story.start(name)
    story.wait_for_step("a", size=3)
    first = story.entries("generation")[0]["members"][0]
    story.signal(first, signal.SIGKILL)
    others = [name for name in "abc" if name != first]
    ends = [story.done(name) for name in others]
    assert ends[0] == ends[1], story
    second = story.entries("generation")[1]
    assert second["lost"] == [first]
    assert second["steps_lost"] <= 1
    assert ends[0]["trained"] == ends[0]["step"]  # BatchNorm has counted no dropped step


def test_a_newcomer_gets_the_state_from_a_peer(story: ElasticStory) -> None:
    """One that joins later trains on from the same weights; nobody reads a checkpoint."""
    for name in "ab":
        story.start(name, seed=3, epochs=4)
    story.folder.read(story.folder.status_json)
    story.wait_for_step("a", size=2)
    story.start("c", seed=11, epochs=4)
    story.wait_for_step("c", size=3)
    ends = [story.done(name) for name in "abc"]
    assert ends[0]["weights"] == ends[1]["weights"] == ends[2]["weights"], story
    assert {one["lr"] for one in ends} == {ends[0]["lr"]}
    assert story.entries("generation")[1]["joined"] == ["c"]
    assert not list((story.folder.run / "checkpoints").glob("step-0000000[1-9]*"))
