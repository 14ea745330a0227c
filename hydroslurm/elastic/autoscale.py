"""How many members an elastic run should want: rules and observations in, a decision out. Pure.

The terms are those of Kubernetes' HorizontalPodAutoscaler and of KEDA. A *metric* with a target
asks for a size (target tracking: size times value over target; the largest request wins), which the
queue may lower. *Stabilization windows* take the most cautious recommendation of a while, and
*cooldowns* and steps bound how often and how far the size moves. ``min`` and ``max`` always hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hydroslurm.elastic.roster import Size

UTILIZATIONS = ("cpu", "memory", "gpu")


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """How far and how often the size moves in one direction.

    Attributes:
        stabilization_window_s: the most cautious recommendation of so long counts.
        cooldown_s: so long after a change of the size nothing moves.
        step: at most so many members at once.
    """

    stabilization_window_s: int
    cooldown_s: int = 180
    step: int = 4


SCALE_UP = Behavior(stabilization_window_s=60)
SCALE_DOWN = Behavior(stabilization_window_s=300)


@dataclass(frozen=True, kw_only=True)
class AutoscalePolicy:
    """The rules of a job spec, which has checked them; what is None does not count.

    Attributes:
        dry_run: decide, and record what would have been done; the size stays.
        partition: whose queue counts; "": that of the coordinator's job.
        step_time_s: the target of a step's time.
        cpu, memory, gpu: targets of use, 0 to 1.
        queue_length: more jobs of others waiting in the partition than this, and the run gives
            nodes back.
        tolerance: a target missed by less than this part of it is met.
    """

    dry_run: bool = False
    partition: str = ""
    step_time_s: float | None = None
    cpu: float | None = None
    memory: float | None = None
    gpu: float | None = None
    queue_length: int | None = None
    tolerance: float = 0.1
    scale_up: Behavior = SCALE_UP
    scale_down: Behavior = SCALE_DOWN

    @property
    def history_s(self) -> float:
        """How long an observation counts."""
        both = (self.scale_up, self.scale_down)
        return max(max(one.stabilization_window_s, one.cooldown_s) for one in both)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """How the run and its partition stood at one moment; None: not known.

    Attributes:
        size: members that trained.
        wanted: members that were wanted.
        step_s: of the whole run.
        cpu, memory, gpu: use of the members' nodes, the mean of them, 0 to 1.
        pending_jobs: of others, in the partition.
    """

    moment_s: float
    size: int
    wanted: int
    step_s: float | None = None
    cpu: float | None = None
    memory: float | None = None
    gpu: float | None = None
    pending_jobs: int | None = None


@dataclass(frozen=True)
class Decision:
    """What should be wanted now, and why: for ``describe`` and the ledger."""

    size: int
    reason: str


def decide(policy: AutoscalePolicy, size: Size, history: Sequence[Observation]) -> Decision:
    """The size that should be wanted at the newest observation, which is the last one; ``history``
    begins with the coordinator or ``policy.history_s`` ago."""
    now_s, wanted = history[-1].moment_s, history[-1].wanted
    newest = _recommend(policy, size, history[-1])
    if newest.size == wanted:
        return newest
    up = newest.size > wanted
    behavior = policy.scale_up if up else policy.scale_down
    window_s = behavior.stabilization_window_s
    if history[0].moment_s > now_s - window_s:
        why = f"observed for less than {window_s:g} s before scaling {'up' if up else 'down'}"
        return Decision(wanted, f"{newest.reason}; {why}")
    cautious = min if up else max
    within = [_recommend(policy, size, one) for one in history if one.moment_s >= now_s - window_s]
    towards = cautious([newest, *within], key=lambda one: one.size)
    if (towards.size > wanted) != up or towards.size == wanted:
        why = f"stabilizing: {towards.size} was recommended within {window_s:g} s"
        return Decision(wanted, f"{newest.reason}; {why}")
    changed_s = _changed_s(history)
    if changed_s is not None and now_s - changed_s < behavior.cooldown_s:
        left_s = behavior.cooldown_s - (now_s - changed_s)
        return Decision(wanted, f"{newest.reason}; cooling down for another {left_s:.0f} s")
    by = min(behavior.step, abs(towards.size - wanted))
    return Decision(wanted + by if up else wanted - by, towards.reason)


def _recommend(policy: AutoscalePolicy, bounds: Size, seen: Observation) -> Decision:
    """What one observation asks for: the largest request of the metrics, lowered by the queue."""
    size, reason = _requested(policy, bounds.max, seen)
    if policy.queue_length is not None and (seen.pending_jobs or 0) > policy.queue_length:
        over = (seen.pending_jobs or 0) - policy.queue_length
        if seen.wanted - over < size:
            size = seen.wanted - over
            reason = f"{seen.pending_jobs} jobs wait, {policy.queue_length} may"
    allowed = min(max(size, bounds.min), bounds.max)
    if size != allowed:
        reason = f"{reason}, within elastic.min and max: {allowed}"
    return Decision(allowed, reason)


def _requested(policy: AutoscalePolicy, most: int, seen: Observation) -> tuple[int, str]:
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
        return most, "as many as may be"
    return max(requests)


def _changed_s(history: Sequence[Observation]) -> float | None:
    for before, after in zip(reversed(history[:-1]), reversed(history), strict=False):
        if before.wanted != after.wanted:
            return after.moment_s
    return None
