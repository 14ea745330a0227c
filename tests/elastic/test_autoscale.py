"""The rules of autoscaling, on traces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from hydroslurm.elastic.autoscale import Decision, Observation, decide
from hydroslurm.elastic.autoscale_rules import AutoscalePolicy, Behavior, Schedule
from hydroslurm.errors import UsageError

EVERY_S = 30.0
MONDAY_S = 1_767_571_200.0  # 2026-01-05 00:00 UTC
PROMPT = Behavior(stabilization_window_s=0, cooldown_s=0, step=64)


def simulate(
    policy: AutoscalePolicy,
    world: Callable[[float, int], dict[str, Any]],
    *,
    hours: float,
    size: int,
    start_s: float = MONDAY_S,
) -> list[tuple[float, Decision]]:
    """The decisions over a trace, obeyed at once; ``world``: what is seen at a time and size."""
    history: list[Observation] = []
    decisions = []
    for tick in range(int(hours * 3600 / EVERY_S)):
        now_s = start_s + tick * EVERY_S
        history.append(Observation(epoch_s=now_s, size=size, wanted=size, **world(now_s, size)))
        history = [one for one in history if one.epoch_s >= now_s - policy.history_s]
        decision = decide(policy, history, now_s)
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


def test_a_day_of_idle_nodes_is_followed_with_few_changes() -> None:
    """The run grows into what others leave at night, and never beyond it."""
    policy = AutoscalePolicy(min=2, max=32, leave_idle=2, queue_length=0)

    def cluster(now_s: float, size: int) -> dict[str, Any]:
        free = round(17 + 15 * math.cos((now_s - MONDAY_S) / 86400 * 2 * math.pi))
        return {"idle_nodes": max(0, free - size), "pending_jobs": max(0, size - free)}

    decisions = simulate(policy, cluster, hours=24, size=2)
    sizes = [decision.size for _, decision in decisions]
    assert max(sizes) == 30
    assert min(sizes[1000:1600]) <= 4  # at noon, when others have the nodes
    for now_s, decision in decisions:
        free = round(17 + 15 * math.cos((now_s - MONDAY_S) / 86400 * 2 * math.pi))
        assert decision.size <= max(2, free + 4)  # the window, behind a falling cluster
    path = [2, *(size for _, size in changes(decisions, 2))]
    turns = [
        (after > at) != (at > before)
        for before, at, after in zip(path, path[1:], path[2:], strict=False)
    ]
    assert sum(turns) == 2  # up, down through the morning, up again in the evening


@pytest.mark.parametrize("period", [1, 2])
def test_a_flapping_queue_moves_nothing(period: int) -> None:
    """Jobs that wait for a moment only are no reason to give nodes back and take them again."""
    policy = AutoscalePolicy(min=1, max=8, leave_idle=0, queue_length=0)

    def cluster(now_s: float, size: int) -> dict[str, Any]:
        busy = int((now_s - MONDAY_S) / EVERY_S) // period % 2
        return {"idle_nodes": 4 * (1 - busy), "pending_jobs": 4 * busy}

    assert changes(simulate(policy, cluster, hours=4, size=4), 4) == []
    prompt = AutoscalePolicy(
        min=1, max=8, leave_idle=0, queue_length=0, scale_up=PROMPT, scale_down=PROMPT
    )
    assert len(changes(simulate(prompt, cluster, hours=4, size=4), 4)) > 100


def test_the_run_stops_growing_where_the_last_member_does_not_pay() -> None:
    """Throughput that saturates: the size comes to rest, and is not tried again for a while."""
    policy = AutoscalePolicy(
        min=1,
        max=32,
        efficiency=0.5,
        history_s=4 * 3600,
        scale_up=Behavior(stabilization_window_s=60, cooldown_s=180, step=1),
    )

    def throughput(_: float, size: int) -> dict[str, Any]:
        return {"samples_per_s": 100 * size / (1 + 0.05 * (size - 1))}

    decisions = simulate(policy, throughput, hours=4, size=1)
    # marginal(n) = d/dn of n / (1 + 0.05 (n - 1)) falls below a half between 8 and 10 members
    assert 7 <= decisions[-1][1].size <= 9
    assert len({decision.size for _, decision in decisions[-200:]}) == 1
    assert "brings" in decisions[-1][1].reason


def test_a_size_is_measured_before_it_is_left() -> None:
    """Else there would be nothing to compare the next one with. Where nobody tells, the rule holds
    nothing up for long."""
    policy = AutoscalePolicy(min=1, max=4, efficiency=0.5, scale_up=PROMPT)

    def throughput(now_s: float, size: int) -> dict[str, Any]:
        return {"samples_per_s": 100.0 if now_s >= MONDAY_S + 240 else None}

    decisions = simulate(policy, throughput, hours=1, size=1)
    path = changes(decisions, 1)
    assert path[0] == (MONDAY_S + 240 + 2 * EVERY_S, 4)
    assert "samples per second of 1 members are not known yet" in decisions[0][1].reason
    assert path[-1][1] == 1
    never = changes(simulate(policy, lambda *_: {}, hours=1, size=1), 1)
    assert never == [(MONDAY_S + 9 * EVERY_S, 4)]


def test_a_target_is_tracked() -> None:
    """A step of a fixed amount of work comes to its target, and stays within the tolerance."""
    policy = AutoscalePolicy(min=1, max=64, step_time_s=1.0)
    decisions = simulate(policy, lambda _, size: {"step_s": 16 / size}, hours=2, size=4)
    assert decisions[-1][1].size in (15, 16, 17)
    assert len(changes(decisions, 4)) <= 5
    down = simulate(policy, lambda _, size: {"step_s": 4 / size}, hours=2, size=32)
    assert down[-1][1].size == 4


def test_a_metric_that_is_not_known_holds_the_size() -> None:
    """No observation of a target is no reason to go down, nor to go up."""
    policy = AutoscalePolicy(min=1, max=8, cpu=0.7, gpu=0.9)
    decisions = simulate(policy, lambda *_: {"cpu": 0.1, "gpu": None}, hours=1, size=4)
    assert changes(decisions, 4) == []
    assert "gpu is not known" in decisions[-1][1].reason


def test_ceiling_and_schedule_hold_at_once() -> None:
    """Neither a window nor a cooldown nor a step keeps the size above a ceiling."""
    office = Schedule(days=("mon",), start="08:00", end="18:00", max=3, time_zone="UTC")
    policy = AutoscalePolicy(
        min=1, max=32, schedule=(office,), node_price_per_hour=2.5, max_price_per_hour=50
    )
    decisions = simulate(policy, lambda *_: {}, hours=24, size=1)
    for now_s, decision in decisions:
        hour = (now_s - MONDAY_S) / 3600
        assert decision.size <= (3 if 8 <= hour < 18 else 20)
    assert decisions[-1][1].size == 20
    at_eight = next(one for now_s, one in decisions if now_s == MONDAY_S + 8 * 3600)
    assert (at_eight.size, "schedule" in at_eight.reason) == (3, True)


def test_a_schedule_goes_over_midnight_in_its_own_time_zone() -> None:
    """22:00 to 06:00 of a Monday in Berlin is 21:00 to 05:00 UTC, and ends on Tuesday."""
    night = Schedule(days=("mon",), start="22:00", end="06:00", time_zone="Europe/Berlin", min=4)
    hours = [hour for hour in range(72) if night.holds(MONDAY_S - 86400 + hour * 3600)]
    assert hours == list(range(45, 53))


def test_a_step_and_a_cooldown_bound_each_change() -> None:
    """The size never moves by more than a step, nor sooner than the cooldown after the last."""
    behavior = Behavior(stabilization_window_s=60, cooldown_s=300, step=3)
    policy = AutoscalePolicy(min=1, max=32, scale_up=behavior)
    found = changes(simulate(policy, lambda *_: {}, hours=1, size=1), 1)
    assert [size for _, size in found[:3]] == [4, 7, 10]
    assert all(after[0] - before[0] >= 300 for before, after in itertools.pairwise(found))


def test_a_decision_follows_from_the_history_alone() -> None:
    """The order of the observations, what is old and what is later do not matter."""
    policy = AutoscalePolicy(min=1, max=8, step_time_s=1.0, history_s=600)
    now_s = MONDAY_S
    history = [
        Observation(epoch_s=now_s - 30.0 * n, size=2, wanted=2, step_s=2.0) for n in range(20)
    ]
    odd = [
        Observation(epoch_s=now_s + 60, size=8, wanted=8, step_s=0.1),
        Observation(epoch_s=now_s - 9999, size=8, wanted=8, step_s=0.1),
    ]
    decision = decide(policy, history, now_s)
    assert decision == decide(policy, [*odd, *reversed(history)], now_s)
    assert decision == Decision(4, 4, "step_s 2, target 1: 4 members")
    with pytest.raises(UsageError, match="nothing was observed"):
        decide(policy, odd, now_s)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"cpu": 80}, "cpu=80; wanted a part of 1"),
        ({"step_time_s": 0}, "step_time_s=0; wanted more than 0"),
        ({"gpus": 0.5}, "no rule gpus; there are cpu"),
        ({"node_price_per_hour": 2}, "wanted both, or neither"),
        ({"node_price_per_hour": 9, "max_price_per_hour": 10}, "pays for 1 nodes at 9 each"),
        ({"schedule": [{"max": 99}]}, "a schedule of 2 to 99 members, and elastic allows 2 to 8"),
        ({"schedule": [{"max": 4, "days": ["monday"]}]}, "'monday' is no day"),
        ({"schedule": [{"max": 4, "start": "25:00"}]}, "'25:00' is no time of day"),
        ({"schedule": [{"max": 4, "time_zone": "Mars/North"}]}, "no time zone 'Mars/North'"),
        ({"schedule": [{}]}, "would change nothing"),
        ({"scale_up": {"step": 0}}, "step=0; wanted 1 or more"),
        ({"history_s": 10}, "shorter than a stabilization window of 300 s"),
        ({"cpu": "much"}, "autoscale: "),
    ],
)
def test_rules_that_cannot_hold_are_refused(rules: dict[str, Any], said: str) -> None:
    """What was given, what is wanted."""
    with pytest.raises(UsageError) as caught:
        AutoscalePolicy.from_json(rules, least=2, most=8)
    assert said in str(caught.value)
