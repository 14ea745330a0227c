"""With ``summation: fixed_order`` losses and weights are those of a fixed size, bit for bit, over
any sequence of sizes: with dropout, augmentation, clipping and random numbers of the script."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elasticstory import BATCH, IN_SHARDS, SAMPLES_IN_SHARDS, TRAIN, ElasticStory, losses
from processes import wait_until

LONG: dict[str, Any] = {"samples": SAMPLES_IN_SHARDS, "epochs": 6, "step_s": 0.03}
OPTIONS: dict[str, Any] = {"max": 3, "summation": "fixed_order"}


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """The losses and the end of one member, alone from the beginning to the end."""
    with ElasticStory(
        tmp_path_factory.mktemp("fixed"), program=IN_SHARDS, **OPTIONS, wanted=1
    ) as story:
        story.start("x", **LONG | {"step_s": 0.0})
        end = story.done("x")
        return losses(story), end


@pytest.fixture
def story(tmp_path: Path) -> Iterator[ElasticStory]:
    with ElasticStory(tmp_path, program=IN_SHARDS, **OPTIONS) as one:
        yield one


def test_the_bits_are_those_of_a_fixed_size(
    story: ElasticStory, fixed: tuple[Any, dict[str, Any]]
) -> None:
    """Two, three, one (one leaves, one is killed) and two again: each loss, each number drawn and
    the weights are those of one member that trained alone."""
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


@pytest.mark.long
def test_loader_workers_change_no_bit(tmp_path: Path) -> None:
    """With a data set that is seeded for each sample the bits do not hang on who fetches it: none,
    or two workers of each of two members, of which one leaves."""
    seeded = IN_SHARDS.replace(
        "rest = []", "data = hydroslurm.data.SeededDataset(data, seed=3)\n    rest = []"
    )
    ends, told = [], []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        with ElasticStory(
            tmp_path / name, program=seeded, **OPTIONS | {"max": 2, "wanted": 1 + (name == "two")}
        ) as story:
            if name == "one":
                story.start("a", **LONG | {"step_s": 0.0})
            else:
                story.start_all("ab", **LONG, workers=2)
                story.wait_for_step("a", size=2)
                story.signal("b", signal.SIGTERM)
                story.wait_for_step("a", size=1)
            ends.append(story.done("a"))
            told.append(losses(story))
    assert ends[0] == ends[1], story
    assert told[0] == told[1], story


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
            IN_SHARDS.replace("losses[int(ids[0])]", "break #"),
            "an optimizer stepped before all shards of its step",
        ),
        (
            IN_SHARDS.replace(
                "for batch in", "run.register('own', torch.Generator())\n        for batch in"
            ),
            "register('own')",
        ),
    ],
    ids=["one batch", "BatchNorm", "steps within", "leaves shards", "own generator"],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, program: str, said: str) -> None:
    """A script that would not get the promised bits ends at its first step, and is told why."""
    with ElasticStory(tmp_path, program=program, **OPTIONS, wanted=1) as story:
        child = story.start("a", samples=SAMPLES_IN_SHARDS)
        assert child.wait() == 1, story
        wait_until(lambda: said in "\n".join(child.lines), lambda: f"{said}\n{story}")
