"""A spare takes the place of a member that goes, and the training is the one that it would have
been: the same losses and weights, bit for bit, with dropout and random numbers of the script."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticstory import TRAIN, ElasticStory
from processes import wait_until

from hydroslurm.elastic.transfer import pack, unpack
from hydroslurm.errors import RanksError

RANDOM = (
    TRAIN.replace("import json,", "import random, signal, numpy, json,")
    .replace(
        "with hydroslurm.Run(",
        "random.seed(0); numpy.random.seed(0)\n"
        "    drawn = torch.Generator().manual_seed(5)\n"
        "    with hydroslurm.Run(",
    )
    .replace(
        "for x, y, ids in",
        "run.register('drawn', drawn, per_rank=True)\n        for x, y, ids in",
    )
    .replace(
        "step = run.step\n",
        "step = run.step\n"
        "            if (step, dist.get_rank(), run.generation) == (7, options.get('goes'), 1):\n"
        "                while not os.path.exists('../go'): time.sleep(0.01)\n"
        "                time.sleep(0.2)  # the step goes on for a while\n"
        "                os.kill(os.getpid(), options['signo'])\n",
    )
    .replace(
        "model(x), y)",
        "model(x), y * (random.random() + numpy.random.rand() + torch.rand((), generator=drawn)))",
    )
)
"""Draws from each kind of generator in every step; one rank goes within step 7."""
SHORT = {"samples": 160, "step_s": 0.0}


def losses(story: ElasticStory) -> dict[tuple[int, int], float]:
    """Of each step and rank, as it was trained at last."""
    newest: dict[tuple[int, int], dict[str, Any]] = {}
    for log in story.all_steps():
        for one in log:
            key = one["step"], one["rank"]
            if key not in newest or newest[key]["generation"] <= one["generation"]:
                newest[key] = one
    return {key: one["loss"] for key, one in newest.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The losses and the end of two that train alone."""
    with ElasticStory(tmp_path_factory.mktemp("alone"), program=RANDOM, max=2) as story:
        story.start_all("ab", **SHORT)
        end = story.done("a")
        story.done("b")
        return losses(story), end


@pytest.mark.parametrize(
    ("signo", "rank"),
    [
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.long),
    ],
)
def test_a_spare_goes_on_with_the_same_numbers(
    tmp_path: Path, undisturbed: tuple[Any, Any], signo: int, rank: int
) -> None:
    """One goes in the middle of an epoch; the spare that waits takes its rank. Another spare, which
    was told to stop, has left before."""
    with ElasticStory(tmp_path, program=RANDOM, max=2, spares=1) as story:
        story.start_all("abc", **SHORT, goes=rank, signo=signo)
        trained = list(story.wait_for("generation")["members"])
        (spare,) = set("abc") - set(trained)
        story.start("d", **SHORT)
        wait_until(
            lambda: json.dumps(story.folder.read(story.folder.status_json)).count('"Ready"') == 2,
            lambda: f"the spares\n{story}",
        )
        story.signal("d", signal.SIGTERM)
        assert story.ended("d") == 75, story
        (tmp_path / "go").touch()
        ends = [story.done(name) for name in (trained[1 - rank], spare)]
        change = story.entries("generation")[1]
        trained[rank] = spare
        assert (change["members"], change["joined"]) == (trained, [spare]), story
        assert ends[0] == ends[1] == undisturbed[1], story
        assert losses(story) == undisturbed[0], story


BULKY = TRAIN.replace(
    "for x, y, ids in",
    """class Cache:
        rows = torch.zeros(options.get("rows", 0), 1024)
        def state_dict(self):
            return {"rows": self.rows}
        def load_state_dict(self, state):
            self.rows = state["rows"]
    cache = Cache()
    run.register("cache", cache, per_rank=True)
    for x, y, ids in""".replace("\n    ", "\n        "),
).replace(
    "step = run.step\n",
    "step = run.step\n            if step == 5: cache.rows = torch.zeros(1024, 1024)\n",
)
"""Each rank keeps rows of 4 KiB; from the fifth step on 4 MiB of them."""


@pytest.mark.long
def test_a_large_state_of_each_rank_is_told(tmp_path: Path) -> None:
    """How many bytes go behind each step, which object they are and what to do, once; and that one
    which has outgrown its message is not kept."""
    with ElasticStory(tmp_path, program=BULKY, max=2, spares=1) as story:
        story.start_all("ab", **SHORT, rows=512)
        for name in "ab":
            story.done(name)
        said = "\n".join(story.members["a"].lines)
        assert said.count("are sent to another rank after each step") == 1, story
        assert "most is registered 'cache' (2,097," in said, story
        assert said.count("a spare would not have it") == 1, story


def test_a_packed_state_is_what_was_packed() -> None:
    """Of every type, empty ones too; a bit that has changed is seen."""
    state = {"a": torch.arange(5), "b": {"c": torch.empty(0), "d": [1, "x", None]}, "e": 2.5}
    data = pack(state)
    found = unpack(data)
    assert torch.equal(found["a"], state["a"])
    assert (found["b"]["c"].numel(), found["b"]["d"], found["e"]) == (0, [1, "x", None], 2.5)
    data[-1] ^= 1
    with pytest.raises(RanksError, match="other bytes"):
        unpack(data)
