"""All members are lost between two saves: the steps since the last one are trained again, to the
same bits at another size."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from elasticstory import IN_SHARDS, SAMPLES_IN_SHARDS, ElasticStory, losses
from processes import wait_until

SAVED_EVERY = 15
PROGRAM = IN_SHARDS.replace("every_s=0,", f"every_steps={SAVED_EVERY},")
OPTIONS: dict[str, Any] = {"max": 3, "summation": "fixed_order"}
TOLD: dict[str, Any] = {"samples": SAMPLES_IN_SHARDS, "epochs": 4}


def lose_all(story: ElasticStory) -> int:
    """SIGKILL for both members some steps behind a save; the newest step that is complete."""
    story.start_all("ab", **TOLD)

    def trained() -> int:
        return max((one["step"] for one in story.steps("a")), default=0)

    def saved() -> int:
        saves = (story.folder.run / "checkpoints").glob("step-*")
        return max((int(one.name[5:]) for one in saves if one.name[5:].isdigit()), default=0)

    wait_until(
        lambda: saved() > 0 and trained() >= saved() + 3,
        lambda: f"a save, and steps behind it\n{story}",
    )
    for name in "ab":
        story.signal(name, signal.SIGKILL)
    for name in "ab":
        assert story.members[name].wait() == -signal.SIGKILL
    return trained()


def test_the_replay_has_the_same_bits_at_another_size(tmp_path: Path) -> None:
    """Two are killed; one goes on from the checkpoint. The steps that were lost come out as they
    were, and the end is that of a run that nobody has disturbed."""
    with ElasticStory(tmp_path, program=PROGRAM, **OPTIONS, wanted=2) as story:
        last = lose_all(story)
        before = losses(story)
        story.start("c", **TOLD, seed=9, step_s=0.0)
        end = story.done("c")
        begun = story.steps("c")[0]["step"]
        assert 0 < begun < last, story
        assert begun % SAVED_EVERY == 0
        after = losses(story)
        lost = [key for key in before if begun <= key[0] < last]
        assert lost
        assert {key: before[key] for key in lost} == {key: after[key] for key in lost}
        generation = story.entries("generation")[-1]
        assert (generation["ranks"], generation["step"]) == (1, begun), story
        assert generation["steps_lost"] <= last + 1 - begun, story
        (tmp_path / "alone").mkdir()
        with ElasticStory(tmp_path / "alone", program=PROGRAM, **OPTIONS, wanted=1) as alone:
            alone.start("x", **TOLD, step_s=0.0)
            assert alone.done("x") == end
            assert losses(alone) == after
