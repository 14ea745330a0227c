"""With ``summation: fixed_order`` losses and weights are those of a fixed size, bit for bit, over
any sequence of sizes: with dropout, augmentation, clipping and random numbers of the script."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from elasticstory import (
    BATCH,
    IN_SHARDS,
    SAMPLES_IN_SHARDS,
    TRAIN,
    ElasticStory,
    goes_on,
    losses,
)
from processes import wait_until

LONG: dict[str, Any] = {"samples": SAMPLES_IN_SHARDS, "epochs": 6, "step_s": 0.03}
OPTIONS: dict[str, Any] = {"max": 3, "summation": "fixed_order"}


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """The losses and the end of one member, alone from the beginning to the end."""
    folder = tmp_path_factory.mktemp("fixed")
    with ElasticStory(folder, program=IN_SHARDS, **OPTIONS, wanted=1) as story:
        story.start("x", **LONG | {"step_s": 0.0})
        end = story.done("x")
        return losses(story), end


def test_the_bits_are_those_of_a_fixed_size(
    tmp_path: Path, fixed: tuple[Any, dict[str, Any]]
) -> None:
    """Two, three, one (one leaves, one is killed) and two again: each loss, each number drawn and
    the weights are those of one member that trained alone."""
    with ElasticStory(tmp_path, program=IN_SHARDS, **OPTIONS) as story:
        story.start_all("ab", **LONG)
        story.wait_for_step("a", size=2, times=2)
        story.start("c", **LONG, seed=5)
        story.wait_for_step("c", size=3, times=2)
        story.signal("a", signal.SIGTERM)
        story.wait_for_step("c", size=2, times=2)
        story.signal("b", signal.SIGKILL)
        story.wait_for_step("c", size=1, times=2)
        story.start("d", **LONG, seed=6)
        story.wait_for_step("d", size=2, times=2)
        ends = [story.done(name) for name in "cd"]
        assert [one["ranks"] for one in story.entries("generation")][:5] == [2, 3, 2, 1, 2], story
        assert ends[0] == ends[1] == fixed[1], story
        assert losses(story) == fixed[0], story
        assert fixed[1]["step"] == LONG["epochs"] * -(-SAMPLES_IN_SHARDS // (3 * BATCH))


SAVED_EVERY = 15


def test_a_replay_has_the_same_bits_at_another_size(
    tmp_path: Path, fixed: tuple[Any, dict[str, Any]]
) -> None:
    """All members are killed some steps behind a save; one goes on from the checkpoint. The steps
    that were lost come out as they were, and the end is that of an undisturbed run."""
    program = IN_SHARDS.replace("every_s=0,", f"every_steps={SAVED_EVERY},")
    with ElasticStory(tmp_path, program=program, **OPTIONS, wanted=2) as story:
        story.start_all("ab", **LONG)
        first = story.folder.run / "checkpoints" / f"step-{SAVED_EVERY:09d}"
        wait_until(first.is_dir, lambda: f"a save\n{story}")
        goes_on(story, "a")
        for name in "ab":
            story.signal(name, signal.SIGKILL)
        for name in "ab":
            assert story.members[name].wait() == -signal.SIGKILL
        last, before = story.steps("a")[-1]["step"], losses(story)
        story.start("c", **LONG | {"step_s": 0.0}, seed=9)
        assert story.done("c") == fixed[1], story
        begun, after = story.steps("c")[0]["step"], losses(story)
        assert 0 < begun < last, story
        assert begun % SAVED_EVERY == 0
        lost = [key for key in before if begun <= key[0] < last]
        assert lost
        assert {key: before[key] for key in lost} == {key: after[key] for key in lost}
        assert after == fixed[0], story
        generation = story.entries("generation")[-1]
        assert (generation["ranks"], generation["step"]) == (1, begun), story
        assert generation["steps_lost"] <= last + 1 - begun, story


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (TRAIN, "run.shards(batch)"),
        (IN_SHARDS.replace("LayerNorm", "BatchNorm1d"), "buffer '1.running_mean'"),
        (
            IN_SHARDS.replace("seen += ids.tolist()", "optimizer.step()"),
            "an optimizer stepped before all shards of its step",
        ),
        (
            IN_SHARDS.replace(
                "for batch in", "run.register('own', torch.Generator())\n        for batch in"
            ),
            "register('own')",
        ),
    ],
    ids=["one batch", "BatchNorm", "steps within", "own generator"],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, program: str, said: str) -> None:
    """A script that would not get the promised bits ends at its first step, and is told why."""
    with ElasticStory(tmp_path, program=program, **OPTIONS, wanted=1) as story:
        child = story.start("a", samples=SAMPLES_IN_SHARDS)
        assert child.wait() == 1, story
        wait_until(lambda: said in "\n".join(child.lines), lambda: f"{said}\n{story}")
