"""Fixtures of the trainings of several ranks on a real Slurm.

The trainings run side by side, three at a time, from the first test on that looks at one: nearly
all of their time is Slurm's own waiting and the import of torch. Only those that are asked for run.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from clusters import CGROUP, Part
from integration.manyranks.acts import ACTS, COMPARABLE, SHARED, Story, agent
from integration.manyranks.rankstraining import CURTAIN, EPOCHS, script_options
from stories import Stories, stories
from training.trainings import ALONE_LIMIT_S, RECORDED

from hydroslurm.devcluster import DevCluster, cgroups
from hydroslurm.errors import ClusterError

AT_A_TIME = 3
ENDS_WITHIN_S = 900.0
Stage = Stories[Story]


@pytest.fixture(scope="session")
def agents_place(
    request: pytest.FixtureRequest, ranks_cluster: Part
) -> tuple[DevCluster, Sequence[str]]:
    """A cluster and its nodes for ranks below agents: with cgroups, where Slurm signals the agents
    only, if this user and machine can have them."""
    try:
        cgroups.require(CGROUP)
    except ClusterError:
        return ranks_cluster, ranks_cluster.nodes[SHARED][:2]
    cluster = request.getfixturevalue("cgroup_cluster")
    return cluster, cluster.spec.node_names[1:]


@pytest.fixture(scope="session")
def stage(
    request: pytest.FixtureRequest,
    ranks_cluster: Part,
    agents_place: tuple[DevCluster, Sequence[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    """The trainings that the tests of this session look at, all under way."""
    base = tmp_path_factory.mktemp("ranks")
    wanted = {name for item in request.session.items for name in _fixtures_of(item)}
    told = {
        **{name: functools.partial(act, ranks_cluster) for name, act in ACTS.items()},
        "agent": functools.partial(agent, agents_place[0], nodes=agents_place[1]),
    }
    told = {name: act for name, act in told.items() if f"{name}_story" in wanted}
    clusters = (ranks_cluster, agents_place[0])
    with stories(told, base, clusters=clusters, at_a_time=AT_A_TIME) as stage:
        try:
            yield stage
        finally:
            CURTAIN.set()  # whoever has failed, or was interrupted, does not wait for the rest


def _story_of(name: str) -> Any:
    @pytest.fixture(name=f"{name}_story")
    def story(stage: Stage) -> Story:
        return stage.result(name, ENDS_WITHIN_S)

    return story


ddp_story, fsdp_story, worlds_story, agent_story = map(_story_of, [*ACTS, "agent"])


@pytest.fixture(scope="session")
def ddp_alone(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes of the same training when nobody stops it."""
    return trained_alone(tmp_path_factory.mktemp("ddp"), "train_ddp.py")


@pytest.fixture(scope="session")
def fsdp_alone(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained_alone(tmp_path_factory.mktemp("fsdp"), "train_fsdp.py")


@pytest.fixture(scope="session")
def comparable_alone(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one rank all the time."""
    folder = tmp_path_factory.mktemp("comparable")
    return trained_alone(folder, "train_ddp.py", *COMPARABLE, world=1)


def trained_alone(folder: Path, script: str, *options: str, world: int = 4) -> dict[str, Any]:
    out = folder / "out.json"
    training = {
        "script": str(RECORDED / script),
        "world": world,
        "options": [
            *script_options(out, epochs=EPOCHS),
            *options,
            f"--directory={folder / 'run'}",
        ],
    }
    program = Path(__file__).with_name("alone.py")
    command = [sys.executable, str(program), json.dumps(training)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=ALONE_LIMIT_S, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(out.read_text()))


def _fixtures_of(item: pytest.Item) -> tuple[str, ...]:
    return tuple(getattr(item, "fixturenames", ()))
