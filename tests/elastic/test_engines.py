"""The ways of forming a generation: which one is taken, and what it does in one story each."""

from __future__ import annotations

import importlib.metadata
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from elasticstory import SAMPLES, TRAIN, ElasticStory, times_seen

from hydroslurm.elastic import engine as engines
from hydroslurm.elastic import kept_group
from hydroslurm.errors import UsageError

KEPT = ("reconfigure", "torchft")

IN_GROUPS = TRAIN.replace(
    "step = run.step\n",
    """step = run.step
            if run.generation != options.setdefault("made", 0):
                options["made"] = run.generation
                ranks = list(range(dist.get_world_size()))
                beside = dist.new_group(ranks[-2:])
                assert dist.get_process_group_ranks(dist.group.WORLD) == ranks
                if dist.get_rank() in ranks[-2:]:
                    sum_of = torch.tensor(dist.get_rank())
                    dist.all_reduce(sum_of, group=beside)
                    assert sum_of == sum(ranks[-2:]), sum_of
""",
)
"""Makes a group of its own in each generation, and uses it."""


def needs(engine: str) -> None:
    if reason := engines.missing(engine, "gloo"):
        pytest.skip(reason)


@pytest.fixture
def story(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ElasticStory]:
    needs(request.param)
    monkeypatch.setattr(ElasticStory, "engine", request.param)
    one = ElasticStory(tmp_path, program=IN_GROUPS)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize("story", ["in_place", *KEPT], indirect=True)
def test_the_group_follows_its_members(story: ElasticStory) -> None:
    """One leaves, one is killed, one joins, and groups of the script's own are made in between:
    every sample comes once, the weights are equal, and the status names the engine."""
    for name in "abc":
        story.start(name, epochs=8)
    story.wait_for_step("a", size=3)
    story.signal("b", signal.SIGTERM)
    story.wait_for_step("a", size=2)
    story.start("d", epochs=8, seed=5)
    story.wait_for_step("d", size=3)
    story.signal("c", signal.SIGKILL)
    ends = [story.done(name) for name in "ad"]
    assert ends[0] == ends[1], story
    for epoch, seen in times_seen(*story.all_steps("BEGUN")).items():
        assert seen == dict.fromkeys(range(SAMPLES), 1), epoch
    status = story.folder.read(story.folder.status_json)
    assert status is not None
    assert status["engine"] == f"{story.engine} (the spec names it)"
    assert any(story.engine in line for line in story.members["d"].lines)


@pytest.mark.parametrize("story", KEPT, indirect=True)
def test_a_member_that_forms_generations_otherwise_is_told(story: ElasticStory) -> None:
    """Ranks that meet in different ways would wait for each other; the later one ends, and the
    others train on."""
    story.start("a", epochs=6)
    story.wait_for_step("a", size=1)
    options = story.folder.read(story.folder.options_json)
    story.folder.write(story.folder.options_json, {**(options or {}), "engine": "in_place"})
    story.start("b")
    assert story.members["b"].wait() == 1, story
    assert f"by the engine {story.engine}, and this member by in_place" in str(story)
    story.done("a")


def test_what_is_not_to_be_had_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that the spec names is taken or refused; auto takes what any torch has."""
    assert str(engines.choose("auto", "gloo")).startswith("in_place (auto: ")
    with pytest.raises(UsageError, match="below `hydroslurm agent`"):
        engines.choose("restart", "gloo")
    monkeypatch.setattr(kept_group.dist, "init_process_group", lambda: None)
    with pytest.raises(UsageError, match=r"no reconfigurable process groups; 2.14 has"):
        engines.choose("reconfigure", "gloo")


def test_torchft_is_for_one_kind_of_device() -> None:
    """Its process groups have one backend each."""
    needs("torchft")
    with pytest.raises(UsageError, match=r"cpu:gloo,cuda:nccl"):
        engines.choose("torchft", "cpu:gloo,cuda:nccl")


def test_another_torchft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes are used where a subclass would; the next release may have others."""
    needs("torchft")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.3.0")
    with pytest.raises(UsageError, match=r"torchft 0.3.0 is installed, and 0.2 is"):
        engines.choose("torchft", "gloo")
