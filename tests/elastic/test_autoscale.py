"""The rules of autoscaling, on traces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from hydroslurm.elastic.autoscale import AutoscalePolicy, Behavior, Decision, Observation, decide
from hydroslurm.elastic.roster import Size

EVERY_S = 30.0
PROMPT = Behavior(stabilization_window_s=0, cooldown_s=0, step=64)


def simulate(
    policy: AutoscalePolicy,
    world: Callable[[float, int], dict[str, Any]],
    *,
    hours: float,
    size: int,
    least: int = 1,
    most: int = 32,
) -> list[tuple[float, Decision]]:
    """The decisions over a trace, obeyed at once; ``world``: what is seen at a time and size."""
    history: list[Observation] = []
    decisions = []
    for tick in range(int(hours * 3600 / EVERY_S)):
        now_s = tick * EVERY_S
        history.append(Observation(moment_s=now_s, size=size, wanted=size, **world(now_s, size)))
        history = [one for one in history if one.moment_s >= now_s - policy.history_s]
        decision = decide(policy, Size(min=least, max=most, wanted=size), history)
        decisions.append((now_s, decision))
        size = decision.size
    return decisions


def changes(decisions: list[tuple[float, Decision]], size: int) -> list[tuple[float, int]]:
    """When the size changed, and to what."""
    found = []
    for now_s, decision in decisions:
        if decision.size != size:
            size = decision.size
            found.append((now_s, size))
    return found


def test_a_day_of_other_jobs_is_followed_with_few_changes() -> None:
    """The run gives nodes back while others wait for them, and takes them again at night."""
    policy = AutoscalePolicy(queue_length=0)

    def cluster(now_s: float, size: int) -> dict[str, Any]:
        free = round(17 + 15 * math.cos(now_s / 86400 * 2 * math.pi))
        return {"pending_jobs": max(0, size - free)}

    decisions = simulate(policy, cluster, hours=24, size=2, least=2)
    sizes = [decision.size for _, decision in decisions]
    assert max(sizes) == 32
    assert min(sizes[1000:1600]) <= 4  # at noon, when others have the nodes
    for now_s, decision in decisions:
        free = round(17 + 15 * math.cos(now_s / 86400 * 2 * math.pi))
        assert decision.size <= max(2, free + 5)  # the window, after a falling cluster


@pytest.mark.parametrize("period", [1, 2])
def test_a_flapping_queue_moves_nothing(period: int) -> None:
    """Jobs that wait for a moment only are no reason to give nodes back and take them again."""

    def cluster(now_s: float, _: int) -> dict[str, Any]:
        return {"pending_jobs": 4 * (int(now_s / EVERY_S) // period % 2)}

    calm = simulate(AutoscalePolicy(queue_length=0), cluster, hours=4, size=4, most=4)
    assert changes(calm, 4) == []
    prompt = AutoscalePolicy(queue_length=0, scale_up=PROMPT, scale_down=PROMPT)
    assert len(changes(simulate(prompt, cluster, hours=4, size=4, most=4), 4)) > 100


def test_a_target_is_tracked() -> None:
    """A step of a fixed amount of work comes to its target, and stays within the tolerance."""
    policy = AutoscalePolicy(step_time_s=1.0)
    decisions = simulate(policy, lambda _, size: {"step_s": 16 / size}, hours=2, size=4)
    assert decisions[-1][1].size in (15, 16, 17)
    assert len(changes(decisions, 4)) <= 5
    down = simulate(policy, lambda _, size: {"step_s": 4 / size}, hours=2, size=32)
    assert down[-1][1].size == 4


@pytest.mark.parametrize(
    ("seen", "size", "reason"),
    [
        ({"cpu": 0.6}, 8, "cpu 0.6, target 0.3: 8 members"),
        ({"cpu": 0.6, "memory": 0.9}, 8, "cpu 0.6, target 0.3: 8 members"),
        ({"cpu": 0.31, "memory": 0.8}, 4, "memory 0.8 meets its target 0.8"),
        ({"cpu": 0.9}, 10, "cpu 0.9, target 0.3: 12 members, within elastic.min and max: 10"),
        ({"cpu": 0.01, "memory": 0.01}, 2, "memory 0.01, target 0.8: 1 members, within"),
        ({"cpu": 0.6, "pending_jobs": 3}, 3, "3 jobs wait, 2 may"),
    ],
)
def test_the_largest_request_wins_and_bounds_and_queue_lower_it(
    seen: dict[str, Any], size: int, reason: str
) -> None:
    """The reason names the metric, its value and what set the size."""
    rules = {"cpu": 0.3, "memory": 0.8, "queue_length": 2}
    policy = AutoscalePolicy(**rules, scale_up=PROMPT, scale_down=PROMPT)
    observed = Observation(moment_s=0.0, size=4, wanted=4, **{"memory": 0.8, **seen})
    decision = decide(policy, Size(min=2, max=10, wanted=4), [observed])
    assert decision.size == size
    assert decision.reason.startswith(reason)


def test_a_metric_that_is_not_known_holds_the_size() -> None:
    """No observation of a target is no reason to go down, nor to go up."""
    policy = AutoscalePolicy(cpu=0.7, gpu=0.9)
    decisions = simulate(policy, lambda *_: {"cpu": 0.1, "gpu": None}, hours=1, size=4)
    assert changes(decisions, 4) == []
    assert "gpu is not known" in decisions[-1][1].reason


def test_a_step_and_a_cooldown_bound_each_change() -> None:
    """The size never moves by more than a step, nor sooner than the cooldown after the last."""
    behavior = Behavior(stabilization_window_s=60, cooldown_s=300, step=3)
    policy = AutoscalePolicy(scale_up=behavior)
    found = changes(simulate(policy, lambda *_: {}, hours=1, size=1), 1)
    assert [size for _, size in found[:3]] == [4, 7, 10]
    assert found[0][0] == 60
    assert all(after[0] - before[0] >= 300 for before, after in itertools.pairwise(found))
