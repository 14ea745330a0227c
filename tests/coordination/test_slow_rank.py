"""The rank that the others wait for, of real ranks over gloo."""

from __future__ import annotations

import pytest
from coordination.attempts import Story
from processes import wait_until

from hydroslurm.core.status import RankStatus, read_status
from hydroslurm.observe.training import slow_ranks


@pytest.mark.parametrize(
    ("forward_s", "model", "slow"),
    [
        ([0.1, 0.1, 0.3], "ddp", [2]),
        ([0.3, 0.1], "ddp-buffers", [0]),
        ([0.1, 0.1], "ddp", []),
    ],
)
def test_the_slow_rank_is_named(
    story: Story, forward_s: list[float], model: str, slow: list[int]
) -> None:
    """By the time to its first collective, behind which all steps take equally long; equal ranks
    are not told apart."""
    world = len(forward_s)
    environ = {"HYDROSLURM_HEARTBEAT_S": "0.1"}
    attempt = story.begin_training(world, forward_s=forward_s, model=model, environ=environ)
    found: list[RankStatus] = []

    def told() -> bool:
        found[:] = filter(None, (read_status(story.run.rank_status(n)) for n in range(world)))
        return all(one.first_collective_s and one.steps_per_s for one in found)

    wait_until(told, "the time to the first collective of each")
    named = slow_ranks(found)
    assert [one.rank for one in named] == slow
    for one in named:
        assert one.factor == pytest.approx(3, rel=0.3)
        assert one.message.startswith(f"rank {one.rank} on {found[0].host} reaches its first")
    attempt.signal(0)
    attempt.end()
