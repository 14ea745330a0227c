"""Estimate the work that a preemption at this moment would lose. Pure.

The result is an upper bound, or 0; what is not known is never underestimated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hydroslurm.checkpoint.deadline import SAFETY
from hydroslurm.observe.folder import RunFacts
from hydroslurm.slurm.policy import PreemptAction, SitePolicy, StopKind
from hydroslurm.slurm.values import Job, JobState

_HAS_PROCESSES = frozenset(
    {JobState.RUNNING, JobState.SUSPENDED, JobState.STOPPED, JobState.RESIZING}
)


@dataclass(frozen=True)
class WorkAtRisk:
    """What would be lost.

    Attributes:
        why: the fact that it rests on, in a few words.
        steps: at most so many; None where steps are not told.
        seconds: at most the work of so long; None where not even that is known.
    """

    why: str
    steps: int | None = None
    seconds: float | None = None

    @property
    def is_nothing(self) -> bool:
        return self.steps == 0 or self.seconds == 0


def loss_now(
    job: Job, facts: RunFacts, policy: SitePolicy | None, *, now_epoch_s: float
) -> WorkAtRisk | None:
    """What a preemption now would cost; None for a job that has nothing to lose: it waits, or has
    ended.

    Args:
        policy: the site's, for this job; None when it could not be asked.
    """
    if job.state not in _HAS_PROCESSES:
        return None
    if policy is not None and policy.action is PreemptAction.PAUSE:
        return WorkAtRisk("a preemption pauses it in place", 0, 0.0)
    unsaved = _unsaved(job, facts, now_epoch_s=now_epoch_s)
    if job.state is not JobState.RUNNING:
        return WorkAtRisk(
            "a suspended job hears no signal but SIGKILL", unsaved.steps, unsaved.seconds
        )
    if not facts.has_run:
        return unsaved
    if policy is None:
        return WorkAtRisk("this site's grace is not known", unsaved.steps, unsaved.seconds)
    if facts.save_s is None:
        return WorkAtRisk("how long a save takes is not known yet", unsaved.steps, unsaved.seconds)
    left_s = policy.time_left(StopKind.PREEMPTED).seconds
    if policy.action is PreemptAction.NEVER:
        left_s = policy.kill_after_s  # an operator may stop it: the least that any stop leaves
    needs_s = _step_s(facts) + SAFETY * facts.save_s
    if needs_s <= left_s:
        return WorkAtRisk(f"a save takes {facts.save_s:.1f} s, and has {left_s:.0f} s", 0, 0.0)
    message = f"a step and a save may take {needs_s:.0f} s, and have {left_s:.0f} s"
    return WorkAtRisk(message, unsaved.steps, unsaved.seconds)


def unsaved_steps(facts: RunFacts, *, now_epoch_s: float) -> int | None:
    """Steps since the newest durable checkpoint, those included that were made since the rank last
    told; None where steps or checkpoints are not told."""
    base = facts.commit or facts.began
    if base is None or facts.step is None or facts.step_epoch_ns is None:
        return None
    moving = not any(rank.state == "parked" for rank in facts.ranks)
    since_s = max(0.0, now_epoch_s - facts.step_epoch_ns / 1e9) if moving else 0.0
    return max(0, facts.step - base[0]) + math.ceil((facts.steps_per_s or 0.0) * since_s)


def _unsaved(job: Job, facts: RunFacts, *, now_epoch_s: float) -> WorkAtRisk:
    since_ns = facts.commit[1] if facts.commit else None
    start_s = job.start_epoch_s
    if facts.has_run or facts.commit:
        why = "since the last commit" if facts.commit else "nothing is committed yet"
    else:
        why = "all since its start, but for what it saves itself"
    # a checkpoint of an earlier attempt: what was computed before this one's start is not at stake
    begins_s = max((s for s in (since_ns and since_ns / 1e9, start_s) if s), default=None)
    seconds = None if begins_s is None else max(0.0, now_epoch_s - begins_s)
    steps = unsaved_steps(facts, now_epoch_s=now_epoch_s) if facts.has_run else None
    return WorkAtRisk(why if seconds is not None else "its start is not known", steps, seconds)


def _step_s(facts: RunFacts) -> float:
    """How long it may take to the next safe point."""
    if facts.steps_per_s:
        return max(1.0 / facts.steps_per_s, facts.stuck_s)
    return facts.stuck_s if facts.stuck_s or facts.steps_per_s is None else math.inf
