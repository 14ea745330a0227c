"""How many members an elastic run should want: rules and observations in, a decision out. Pure.

The terms are those of Kubernetes' HorizontalPodAutoscaler and of KEDA. A *metric* with a target
asks for a size (target tracking: size times value over target; the largest request wins). *Limits*
lower what is asked for: parallel efficiency, idle nodes, the queue. *Stabilization windows* take
the most cautious recommendation of a while, *cooldowns* and steps bound how often and how far the
size moves. ``min``, ``max``, the price and the schedule are hard: they hold at once.

Everything follows from the history, so a coordinator that starts anew decides as the one before.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydroslurm.elastic.autoscale_rules import UTILIZATIONS, AutoscalePolicy
from hydroslurm.errors import UsageError

FEWEST_PER_SIZE = 3
"""Observations at one size before its throughput counts: steps right after a change are slow."""
TOLD_WITHIN = 10
"""Of so many observations at one size some tell its throughput, or else nobody ever will."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """How the run and its partition stood at one moment; None: not known.

    Attributes:
        size: members that trained.
        wanted: members that were wanted.
        step_s, samples_per_s: of the whole run.
        cpu, memory, gpu: use of the members' nodes, the mean of them, 0 to 1.
        pending_jobs: of others, in the partition.
        idle_nodes: in the partition.
    """

    epoch_s: float
    size: int
    wanted: int
    step_s: float | None = None
    samples_per_s: float | None = None
    cpu: float | None = None
    memory: float | None = None
    gpu: float | None = None
    pending_jobs: int | None = None
    idle_nodes: int | None = None


@dataclass(frozen=True)
class Decision:
    """What should be wanted now.

    Attributes:
        size: members to want; that of now where nothing should change.
        recommended: what the metrics and limits of this moment ask for.
        reason: in words, for ``describe`` and the ledger.
    """

    size: int
    recommended: int
    reason: str


@dataclass(frozen=True)
class _Recommendation:
    epoch_s: float
    size: int
    reason: str


def decide(policy: AutoscalePolicy, history: Sequence[Observation], now_s: float) -> Decision:
    """The size that should be wanted at ``now_s`` (epoch).

    Args:
        history: in any order; what is later than now or older than ``history_s`` does not count.

    Raises:
        UsageError: nothing has been observed.
    """
    seen = sorted(
        (one for one in history if now_s - policy.history_s <= one.epoch_s <= now_s),
        key=lambda one: one.epoch_s,
    )
    if not seen:
        raise UsageError(
            f"nothing was observed in the last {policy.history_s:g} s; the coordinator records "
            "observations while it runs"
        )
    wanted = seen[-1].wanted
    longest_s = max(
        policy.scale_up.stabilization_window_s, policy.scale_down.stabilization_window_s
    )
    bound = _efficient_size(policy, seen)
    recent = [
        _recommend(policy, one, bound) for one in seen if one.epoch_s >= now_s - longest_s
    ] or [_recommend(policy, seen[-1], bound)]
    newest = recent[-1]
    size, reason = _move(policy, seen, recent, now_s)
    least, most, why = bounds(policy, now_s)
    if size > most:
        size, reason = most, f"{why}: at most {most}"
    elif size < least:
        size, reason = least, f"{why}: at least {least}"
    if size == wanted and newest.size == wanted:
        reason = newest.reason
    return Decision(size, newest.size, reason)


def replay(
    policy: AutoscalePolicy, observations: Sequence[Observation]
) -> Iterator[tuple[Observation, Decision]]:
    """What would have been decided at each observation, by those up to it."""
    seen = sorted(observations, key=lambda one: one.epoch_s)
    first = 0
    for number, one in enumerate(seen):
        while seen[first].epoch_s < one.epoch_s - policy.history_s:
            first += 1
        yield one, decide(policy, seen[first : number + 1], one.epoch_s)


def bounds(policy: AutoscalePolicy, now_s: float) -> tuple[int, int, str]:
    """The least and the most members at a moment, and what sets them.

    Where schedules overlap the narrowest holds; a ceiling is stronger than a floor.
    """
    least, most, why = policy.min, policy.max, "elastic.min and max"
    for one in policy.schedule:
        if one.holds(now_s):
            why = f"the schedule from {one.start} to {one.end} {one.time_zone}"
            least = max(least, least if one.min is None else one.min)
            most = min(most, most if one.max is None else one.max)
    if policy.node_price_per_hour is not None and policy.max_price_per_hour is not None:
        paid = math.floor(policy.max_price_per_hour / policy.node_price_per_hour)
        if paid < most:
            most, why = paid, f"the price ceiling of {policy.max_price_per_hour:g} an hour"
    return min(least, most), most, why


def _move(
    policy: AutoscalePolicy,
    seen: Sequence[Observation],
    recent: Sequence[_Recommendation],
    now_s: float,
) -> tuple[int, str]:
    """From the size that is wanted towards the recommendations, as the behavior allows."""
    wanted, newest = seen[-1].wanted, recent[-1]
    if newest.size == wanted:
        return wanted, newest.reason
    up = newest.size > wanted
    behavior = policy.scale_up if up else policy.scale_down
    window_s = behavior.stabilization_window_s
    within = [one for one in recent if one.epoch_s >= now_s - window_s]
    cautious = min if up else max
    towards = cautious([newest, *within], key=lambda one: one.size)
    verb = "up" if up else "down"
    if seen[0].epoch_s > now_s - window_s:
        return (
            wanted,
            f"{newest.reason}; observed for less than {window_s:g} s before scaling {verb}",
        )
    if (towards.size > wanted) != up or towards.size == wanted:
        return wanted, (
            f"{newest.reason}; stabilizing: {towards.size} was recommended within {window_s:g} s"
        )
    changed_s = _changed_s(seen)
    if changed_s is not None and now_s - changed_s < behavior.cooldown_s:
        left_s = behavior.cooldown_s - (now_s - changed_s)
        return wanted, f"{newest.reason}; cooling down for another {left_s:.0f} s"
    by = min(behavior.step, abs(towards.size - wanted))
    return (wanted + by if up else wanted - by), towards.reason


def _recommend(
    policy: AutoscalePolicy, seen: Observation, efficient: tuple[int, str] | None
) -> _Recommendation:
    """What one observation asks for: the largest request of the metrics, lowered by the limits."""
    size, reason = _requested(policy, seen)
    limits = [efficient] if efficient is not None else []
    if policy.leave_idle is not None:
        free = seen.size + max(0, seen.idle_nodes - policy.leave_idle) if seen.idle_nodes else 0
        limits.append((max(seen.wanted, free), f"{seen.idle_nodes or 0} idle nodes"))
    if policy.queue_length is not None and (seen.pending_jobs or 0) > policy.queue_length:
        over = (seen.pending_jobs or 0) - policy.queue_length
        limits.append(
            (seen.wanted - over, f"{seen.pending_jobs} jobs wait, {policy.queue_length} may")
        )
    for limit, why in limits:
        if limit < size:
            size, reason = limit, why
    least, most, why = bounds(policy, seen.epoch_s)
    if size > most or size < least:
        size = min(max(size, least), most)
        reason = f"{reason}, within {why}: {size}"
    return _Recommendation(seen.epoch_s, size, reason)


def _requested(policy: AutoscalePolicy, seen: Observation) -> tuple[int, str]:
    """What the metrics ask for. One that is not known holds the size against going down, as the
    HorizontalPodAutoscaler does."""
    requests: list[tuple[int, str]] = []
    targets = {"step_s": policy.step_time_s}
    targets.update({name: getattr(policy, name) for name in UTILIZATIONS})
    for name, target in targets.items():
        if target is None:
            continue
        value = getattr(seen, name)
        if value is None or not math.isfinite(value) or value <= 0 or not seen.size:
            requests.append((seen.wanted, f"{name} is not known"))
        elif abs(value / target - 1) <= policy.tolerance:
            requests.append((seen.wanted, f"{name} {value:.3g} meets its target {target:g}"))
        else:
            asked = math.ceil(seen.size * value / target - 1e-9)
            requests.append((asked, f"{name} {value:.3g}, target {target:g}: {asked} members"))
    if not requests:
        return policy.max, "as many as may be"
    return max(requests)


def _efficient_size(policy: AutoscalePolicy, seen: Sequence[Observation]) -> tuple[int, str] | None:
    """The largest size whose last member still pays, if a larger one was seen that does not; that
    of now until it is known what a larger one is to be compared with."""
    if policy.efficiency is None:
        return None
    curve = scaling_curve(seen)
    sizes = sorted(curve)
    for smaller, larger in itertools.pairwise(sizes):
        alone = curve[sizes[0]] / sizes[0]
        marginal = (curve[larger] - curve[smaller]) / (larger - smaller) / alone
        if marginal < policy.efficiency:
            return smaller, (
                f"the last of {larger} members brings {marginal:.0%} of a member's samples per "
                f"second, {policy.efficiency:.0%} are wanted"
            )
    now = seen[-1]
    rates = [one.samples_per_s for one in seen if one.size == now.size]
    if now.size not in curve and (any(rates) or len(rates) < TOLD_WITHIN):
        return now.wanted, f"the samples per second of {now.size} members are not known yet"
    return None


def scaling_curve(seen: Sequence[Observation]) -> dict[int, float]:
    """Size -> the median of its samples per second, for each size that was seen often enough."""
    rates: dict[int, list[float]] = {}
    for one in seen:
        if one.samples_per_s and one.samples_per_s > 0 and one.size:
            rates.setdefault(one.size, []).append(one.samples_per_s)
    return {
        size: statistics.median(found)
        for size, found in rates.items()
        if len(found) >= FEWEST_PER_SIZE
    }


def _changed_s(seen: Sequence[Observation]) -> float | None:
    for before, after in zip(reversed(seen[:-1]), reversed(seen), strict=False):
        if before.wanted != after.wanted:
            return after.epoch_s
    return None
