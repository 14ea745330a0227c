"""Fixtures of the trainings of several ranks on a real Slurm.

The trainings run side by side, from the first test on that looks at one: nearly
all of their time is Slurm's own waiting and the import of torch. Only those that are asked for run.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clusters import Part
from integration.manyranks.acts import ACTS, COMPARABLE, SHORT, Story
from integration.manyranks.rankstraining import CURTAIN, EPOCHS, script_options
from processes import free_port
from stories import Stories, marked, result_of, stories
from training.trainings import ALONE_LIMIT_S, RECORDED
from zygote import forked

AT_A_TIME = 3
ENDS_WITHIN_S = 900.0
Stage = Stories[Story]
BE = """
import runpy, sys, warnings
from pathlib import Path
warnings.simplefilter("error")
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A rank without Slurm: the script that its arguments name."""


@pytest.fixture(scope="session")
def stage(
    request: pytest.FixtureRequest,
    ranks_cluster: Part,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    """The trainings that the tests of this session look at, all under way."""
    told = {
        name: functools.partial(act, ranks_cluster)
        for name, act in ACTS.items()
        if name in marked(request)
    }
    base, clusters = tmp_path_factory.mktemp("ranks"), (ranks_cluster,)
    with stories(told, base, clusters=clusters, at_a_time=AT_A_TIME) as stage:
        try:
            yield stage
        finally:
            CURTAIN.set()  # whoever has failed, or was interrupted, does not wait for the rest


@pytest.fixture
def story(request: pytest.FixtureRequest, stage: Stage) -> Story:
    """The training that the test's mark names, ended."""
    return result_of(request, stage, ENDS_WITHIN_S)


@pytest.fixture(scope="session")
def alone(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What comes of the same training when nobody stops it."""

    @functools.cache
    def trained(*options: str, world: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("alone")
        out = folder / "out.json"
        words = [str(RECORDED / "train_ddp.py"), *script_options(out, epochs=EPOCHS), *options]
        place = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with contextlib.ExitStack() as stack:
            ranks = []
            for rank in map(str, range(world)):
                own = folder / rank
                own.mkdir()
                more = {"RANK": rank, "LOCAL_RANK": rank, "GLOO_SOCKET_IFNAME": "lo"}
                words_of_run = (*words, f"--directory={folder / 'run'}")
                started = forked(BE, own, *words_of_run, environ={**place, **more})
                ranks.append(stack.enter_context(started))
            ended = [rank.wait(limit_s=ALONE_LIMIT_S) for rank in ranks]
            assert ended == [0] * world, str(ranks[0])
        return dict(json.loads(out.read_text()))

    return trained


@pytest.fixture
def undisturbed(request: pytest.FixtureRequest, alone: Callable[..., dict[str, Any]]) -> Any:
    """That for the training that the test's mark names. A test asks for it first: it is made while
    that one is under way."""
    like = {"ddp": (3, *SHORT), "worlds": (1, *COMPARABLE)}
    world, *options = like[request.node.get_closest_marker("scene").args[0]]
    return alone(*options, world=world)
