"""All members are lost between two saves: the steps since the last one are trained again, to the
same bits at another size, and their log says so."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elasticstory import IN_SHARDS, SAMPLES_IN_SHARDS, ElasticStory, losses
from processes import wait_until

from hydroslurm.elastic.step_log import Replayed, StepLog

SAVED_EVERY = 15
PROGRAM = IN_SHARDS.replace("every_s=0,", f"every_steps={SAVED_EVERY},").replace(
    "(scale + random.random())", "(scale + random.random()) * options.get('times', 1.0)"
)
OPTIONS: dict[str, Any] = {"max": 3, "summation": "fixed_order", "recovery": "log_replay"}
TOLD: dict[str, Any] = {"samples": SAMPLES_IN_SHARDS, "epochs": 4}


@pytest.fixture
def story(tmp_path: Path) -> Iterator[ElasticStory]:
    with ElasticStory(tmp_path, program=PROGRAM, **OPTIONS, wanted=2) as one:
        yield one


def lose_all(story: ElasticStory) -> int:
    """SIGKILL for both members some steps behind a save; the newest step that is logged."""
    story.start_all("ab", **TOLD)
    log = story.folder.steps_jsonl

    def logged() -> int:
        lines = log.read_text().splitlines() if log.exists() else []
        return max((json.loads(one)["step"] for one in lines if one.endswith("}")), default=0)

    def saved() -> int:
        saves = (story.folder.run / "checkpoints").glob("step-*")
        return max((int(one.name[5:]) for one in saves if one.name[5:].isdigit()), default=0)

    wait_until(
        lambda: saved() > 0 and logged() >= saved() + 3,
        lambda: f"a save, and steps behind it\n{story}",
    )
    for name in "ab":
        story.signal(name, signal.SIGKILL)
    for name in "ab":
        assert story.members[name].wait() == -signal.SIGKILL
    return logged()


def test_the_replay_has_the_same_bits_at_another_size(story: ElasticStory, tmp_path: Path) -> None:
    """Two are killed; one goes on from the checkpoint. The steps that were lost come out as they
    were, and the end is that of a run that nobody has disturbed."""
    last = lose_all(story)
    story.start("c", **TOLD, seed=9, step_s=0.0)
    end = story.done("c")
    said = "\n".join(story.members["c"].lines)
    begun = story.steps("c")[0]["step"]
    assert 0 < begun < last, story
    assert begun % SAVED_EVERY == 0
    assert f"steps {begun + 1} to {last} are bit for bit what they were" in said, story
    generation = story.entries("generation")[-1]
    assert (generation["ranks"], generation["step"]) == (1, begun), story
    assert generation["steps_lost"] <= last - begun, story
    (tmp_path / "alone").mkdir()
    with ElasticStory(tmp_path / "alone", program=PROGRAM, **OPTIONS, wanted=1) as alone:
        alone.start("x", **TOLD, step_s=0.0)
        assert alone.done("x") == end
        assert losses(alone) == losses(story)
    steps = [json.loads(one)["step"] for one in story.folder.steps_jsonl.read_text().splitlines()]
    assert steps == list(range(steps[0], end["step"] + 1))
    assert steps[0] > begun  # what is older than two checkpoints is forgotten


def test_a_replay_that_differs_says_at_which_step(story: ElasticStory) -> None:
    """Somebody has changed the loss between: the first step behind the checkpoint is named,
    and the training goes on."""
    last = lose_all(story)
    story.start("c", **TOLD, step_s=0.0, times=1.5)
    story.done("c")
    said = "\n".join(story.members["c"].lines)
    begun = story.steps("c")[0]["step"]
    assert f"the replay differs from the log at step {begun + 1}, in weights" in said, story
    assert last > begun


def test_a_log_that_cannot_be_written(story: ElasticStory) -> None:
    """A link instead of the file, which is not followed: that is said once, and nothing else of the
    training changes."""
    story.folder.steps_jsonl.symlink_to("nowhere")
    story.start("a", **TOLD, step_s=0.0)
    story.start("b", **TOLD, step_s=0.0)
    assert story.done("a") == story.done("b")
    said = "\n".join(story.members["a"].lines + story.members["b"].lines)
    assert said.count("the log of the steps cannot be written") == 1, story
    assert not (story.folder.root / "nowhere").exists()


def test_a_torn_line_and_a_step_that_differs(tmp_path: Path) -> None:
    """A log that was cut off in the middle of a line is read up to there; it is written anew from
    the step that differs."""
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    assert not log.begin(0)
    for step in range(1, 7):
        assert log.completed({"step": step, "weights": f"w{step}"}) is None
    with path.open("a") as file:
        file.write('{"step": 7, "wei')
    log = StepLog(path)
    assert log.begin(3) == range(4, 7)
    assert log.completed({"step": 4, "weights": "w4", "ranks": 7}) is None
    assert log.completed({"step": 5, "weights": "other"}) == Replayed(4, 5, ("weights",))
    assert log.completed({"step": 6, "weights": "new"}) is None
    kept = [json.loads(line)["weights"] for line in path.read_text().splitlines()]
    assert kept == ["w1", "w2", "w3", "w4", "other", "new"]
    log.committed(3)
    log.committed(5)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [4, 5, 6]
