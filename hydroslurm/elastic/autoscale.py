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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from hydroslurm.errors import UsageError

_Rules = TypeVar("_Rules")
UTILIZATIONS = ("cpu", "memory", "gpu")
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
FEWEST_PER_SIZE = 3
"""Observations at one size before its throughput counts: steps right after a change are slow."""
BEHAVIORS = {
    "scale_up": {"stabilization_window_s": 60.0, "cooldown_s": 180.0, "step": 4},
    "scale_down": {"stabilization_window_s": 300.0, "cooldown_s": 180.0, "step": 4},
}


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


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """How far and how often the size moves in one direction.

    Attributes:
        stabilization_window_s: the most cautious recommendation of so long counts.
        cooldown_s: so long after a change of the size nothing moves.
        step: at most so many members at once.
    """

    stabilization_window_s: float
    cooldown_s: float
    step: int

    def __post_init__(self) -> None:
        _check(self, stabilization_window_s=0, cooldown_s=0, step=1)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Other bounds at certain hours.

    Attributes:
        days: on which a period begins.
        start, end: "HH:MM" in ``time_zone``; an end at or before the start is on the next day.
    """

    days: tuple[str, ...] = DAYS
    start: str = "00:00"
    end: str = "00:00"
    time_zone: str = "UTC"
    min: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        if unknown := [day for day in self.days if day not in DAYS]:
            raise UsageError(f"schedule: {unknown[0]!r} is no day; wanted {', '.join(DAYS)}")
        _minutes(self.start), _minutes(self.end)
        if self.min is None and self.max is None:
            raise UsageError("schedule: neither min nor max is given, so it would change nothing")
        try:
            ZoneInfo(self.time_zone)
        except (ValueError, OSError) as error:  # ZoneInfoNotFoundError is a KeyError
            raise UsageError(f"schedule: time_zone {self.time_zone!r}: {error}") from error
        except KeyError:
            raise UsageError(
                f"schedule: this machine knows no time zone {self.time_zone!r}; wanted a name "
                "such as Europe/Berlin, or UTC"
            ) from None

    def holds(self, epoch_s: float) -> bool:
        """Whether the moment lies in it."""
        local = datetime.fromtimestamp(epoch_s, ZoneInfo(self.time_zone))
        now, today = local.hour * 60 + local.minute, local.weekday()
        start, end = _minutes(self.start), _minutes(self.end)
        if start < end:
            return start <= now < end and DAYS[today] in self.days
        after_midnight = now < end and DAYS[today - 1] in self.days
        return after_midnight or (now >= start and DAYS[today] in self.days)


@dataclass(frozen=True, kw_only=True)
class AutoscalePolicy:
    """The rules; what is None does not count.

    Attributes:
        min, max: of ``elastic``.
        dry_run: decide, and record what would have been done; the size stays.
        partition: whose queue and idle nodes count; "": that of the coordinator's job.
        step_time_s: the target of a step's time.
        cpu, memory, gpu: targets of use, 0 to 1.
        efficiency: the least samples per second of the last member, as a part of what a member
            brings at the smallest size that was seen.
        leave_idle: idle nodes of the partition that are left to others; the run grows into the
            rest.
        queue_length: more jobs of others waiting in the partition than this, and the run gives
            nodes back.
        node_price_per_hour, max_price_per_hour: together a ceiling of the size.
        tolerance: a target missed by less than this part of it is met.
        history_s: older observations are forgotten, so that a size that once did not pay is tried
            again.

    Raises:
        UsageError: they cannot all hold.
    """

    min: int
    max: int
    dry_run: bool = False
    partition: str = ""
    step_time_s: float | None = None
    cpu: float | None = None
    memory: float | None = None
    gpu: float | None = None
    efficiency: float | None = None
    leave_idle: int | None = None
    queue_length: int | None = None
    node_price_per_hour: float | None = None
    max_price_per_hour: float | None = None
    schedule: tuple[Schedule, ...] = ()
    tolerance: float = 0.1
    history_s: float = 3600.0
    scale_up: Behavior = field(default_factory=lambda: _made(Behavior, BEHAVIORS["scale_up"]))
    scale_down: Behavior = field(default_factory=lambda: _made(Behavior, BEHAVIORS["scale_down"]))

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise UsageError(
                f"autoscale: min={self.min}, max={self.max}: 1 <= min <= max is needed"
            )
        for name in (*UTILIZATIONS, "efficiency"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise UsageError(f"autoscale: {name}={value}; wanted a part of 1, as 0.8 for 80 %")
        if self.step_time_s is not None and not 0 < self.step_time_s < math.inf:
            raise UsageError(f"autoscale: step_time_s={self.step_time_s}; wanted more than 0")
        _check(self, leave_idle=0, queue_length=0, tolerance=0, history_s=1)
        longest_s = max(
            self.scale_up.stabilization_window_s, self.scale_down.stabilization_window_s
        )
        if self.history_s < longest_s:
            raise UsageError(
                f"autoscale: history_s={self.history_s:g} is shorter than a stabilization window "
                f"of {longest_s:g} s; raise it"
            )
        self._check_price()
        for one in self.schedule:
            least = self.min if one.min is None else one.min
            most = self.max if one.max is None else one.max
            if not self.min <= least <= most <= self.max:
                raise UsageError(
                    f"autoscale: a schedule of {least} to {most} members, and elastic allows "
                    f"{self.min} to {self.max}"
                )

    def _check_price(self) -> None:
        price, most = self.node_price_per_hour, self.max_price_per_hour
        if (price is None) != (most is None):
            raise UsageError(
                "autoscale: node_price_per_hour and max_price_per_hour: wanted both, or neither"
            )
        if price is None or most is None:
            return
        if not price > 0 or not math.isfinite(most):
            raise UsageError(f"autoscale: node_price_per_hour={price}; wanted more than 0")
        if math.floor(most / price) < self.min:
            raise UsageError(
                f"autoscale: max_price_per_hour={most:g} pays for {math.floor(most / price)} nodes "
                f"at {price:g} each, and min is {self.min}; raise it, or lower min"
            )

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, least: int, most: int) -> AutoscalePolicy:
        """The rules as ``options.json`` has them; ``least``, ``most``: ``elastic.min``, ``max``.

        Raises:
            UsageError: what it does not know, or cannot use.
        """
        given = dict(document)
        try:
            schedule = tuple(
                _made(Schedule, {**one, "days": tuple(one.get("days", DAYS))})
                for one in given.pop("schedule", ())
            )
            for name, default in BEHAVIORS.items():
                if name in given:
                    given[name] = _made(Behavior, {**default, **given[name]})
            return _made(cls, {**given, "schedule": schedule, "min": least, "max": most})
        except UsageError:
            raise
        except (TypeError, ValueError) as error:
            raise UsageError(f"autoscale: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` reads."""
        return {name: value for name, value in asdict(self).items() if name not in ("min", "max")}


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
    """The largest size whose last member still pays, if a larger one was seen that does not."""
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


def _minutes(text: str) -> int:
    hours, colon, minutes = str(text).partition(":")
    digits = colon and len(minutes) == 2 and hours.isdecimal() and minutes.isdecimal()
    if digits and int(hours) < 24 and int(minutes) < 60:
        return int(hours) * 60 + int(minutes)
    raise UsageError(f"schedule: {text!r} is no time of day; wanted HH:MM, 00:00 to 23:59")


def _check(of: object, **least: float) -> None:
    for name, bound in least.items():
        value = getattr(of, name)
        if value is not None and not bound <= value < math.inf:
            raise UsageError(f"autoscale: {name}={value}; wanted {bound:g} or more")


def _made(kind: type[_Rules], given: Any) -> _Rules:
    if not isinstance(given, Mapping):
        raise UsageError(f"autoscale: {given!r} where the fields of {kind.__name__} are wanted")
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    if odd := sorted(given.keys() - known):
        raise UsageError(
            f"autoscale: no rule {', '.join(odd)}; there are {', '.join(sorted(known))}"
        )
    return kind(**given)
