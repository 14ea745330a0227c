"""Members that train apart and average their weights now and then."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from elasticstory import (
    BATCH,
    HASH_OF_WEIGHTS,
    SAMPLES,
    TRAIN,
    ElasticStory,
    times_seen,
    write_options,
)

from hydroslurm import elastic
from hydroslurm.core.rundir import ELASTIC_ENV
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.errors import UsageError

EVERY = 8
APART = (
    TRAIN.replace("import json,", "import hashlib, json,")
    .replace("every_s=0,", "every_steps=5,")
    .replace(
        "step = run.step\n",
        f"step = run.step\n            before, began = sum_of(net), {HASH_OF_WEIGHTS}\n",
    )
    .replace(
        '"step": step,', '"step": step, "began": began, "before": before, "after": sum_of(net),'
    )
    .replace(
        "    with hydroslurm.Run(",
        "    def sum_of(net):\n"
        "        return sum(one.detach().double().sum().item() for one in net.parameters())\n"
        "    with hydroslurm.Run(",
    )
)
"""Saves behind steps 5, 10..., or as soon as the weights are equal; tells their sums."""


def test_weights_are_equal_when_it_matters(tmp_path: Path) -> None:
    """Behind each eighth step, when members change (one joins, one leaves, one is killed), where
    it is saved and at the end; and not between. One that leaves is in the average before it goes.
    """
    with ElasticStory(tmp_path, program=APART, max=3, averaging_every=EVERY) as story:
        story.start_all("ab", epochs=5)
        story.wait_for_step("a", size=2)
        story.start("c", epochs=5, seed=5)
        story.wait_for_step("c", size=3)
        story.signal("a", signal.SIGTERM)
        story.wait_for_step("c", size=2)
        story.start("d", epochs=5, seed=6)
        story.wait_for_step("d", size=3)
        story.signal("b", signal.SIGKILL)
        ends = [story.done(name) for name in "cd"]
    assert ends[0]["weights"] == ends[1]["weights"], story
    begun: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for one in (one for log in story.all_steps() for one in log):
        begun[one["generation"], one["step"]].append(one)
    first = {generation: min(s for g, s in begun if g == generation) for generation, _ in begun}
    last = {step: max(g for g, s in begun if s == step) for _, step in begun}  # else it was dropped
    different = [key for key, of in begun.items() if len({one["began"] for one in of}) > 1]
    assert different
    for generation, step in (key for key in different if key[0] == last[key[1]]):
        assert step % EVERY
        assert step != first[generation]
    *announced, killed = story.entries("generation")
    assert [one["lost"] for one in announced] == [[]] * 4, story
    assert killed["lost"] == ["b"]
    assert any(first[one["generation"]] % EVERY for one in announced)
    for generation in (one["generation"] for one in announced[1:]):
        at = first[generation]
        old = [one["after"] for one in begun[generation - 1, at - 1]]
        (new,) = {one["before"] for one in begun[generation, at]}
        assert len(old) in (2, 3)
        assert new == pytest.approx(sum(old) / len(old), rel=1e-4)
    saved = {int(one.name[5:]) for one in (story.folder.run / "checkpoints").glob("step-*")}
    assert saved
    assert all(step % EVERY == 0 or step == ends[0]["step"] for step in saved), saved
    wrong = [
        sample
        for seen in times_seen(*story.all_steps()).values()
        for sample in range(SAMPLES)
        if seen[sample] != 1
    ]
    # one that is killed between its backward and its line has trained, and has not said so
    assert len(wrong) in (0, BATCH), wrong


@pytest.mark.parametrize("every", [0, pytest.param(EVERY, marks=pytest.mark.long)])
def test_a_save_in_the_loop_is_one_for_all(tmp_path: Path, every: int) -> None:
    """All ranks call it, and the first one saves: at once, or with averaging behind the next
    average, where the weights are equal."""
    saving = TRAIN.replace(
        "scheduler.step()\n",
        "scheduler.step()\n            if step == 4: print('SAVED', run.save().reason)\n",
    )
    with ElasticStory(tmp_path, program=saving, max=2, averaging_every=every) as story:
        story.start_all("ab", samples=160)
        ends = [story.done(name) for name in "ab"]
    assert ends[0] == ends[1], story
    lines = [line for child in story.members.values() for line in child.lines]
    said = sorted(line for line in lines if line.startswith("SAVED"))
    saved = sorted(int(one.name[5:]) for one in (story.folder.run / "checkpoints").glob("step-*"))
    if every:
        assert all("behind the next average, one of every 8 steps" in one for one in said), said
    else:
        assert [one for one in said if "the first rank saves for all" in one] == said[1:], said
    assert (len(said), saved) == (2, [EVERY if every else 5, ends[0]["step"]]), story


@pytest.mark.parametrize(
    ("option", "named"),
    [({"averaging_every": 8}, "`averaging`"), ({"summation": "fixed_order"}, "`summation: fixed_")],
)
def test_a_state_refuses_what_it_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: dict[str, object], named: str
) -> None:
    """Horovod's shape leaves the steps to the script."""
    folder = ElasticFolder(run=tmp_path)
    folder.make_key()
    write_options(folder, max=2, wanted=1, **option)
    monkeypatch.setenv(ELASTIC_ENV, str(tmp_path))
    with pytest.raises(UsageError, match=named):
        elastic.State()
