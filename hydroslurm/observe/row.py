"""One job as a line of ``top``, from Slurm's answer and its run folder's facts, and the work that a
preemption now would lose. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hydroslurm.checkpoint.deadline import SAFETY
from hydroslurm.observe.folder import RunFacts
from hydroslurm.slurm.policy import PreemptAction, SitePolicy, StopReason
from hydroslurm.slurm.values import Job, JobState

STUCK_S = 60.0
"""Delay worth a look: of a step that takes this long and ten times its predecessors' time, or of an
overdue heartbeat."""
LOUD = frozenset(
    {
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.BOOT_FAIL,
        JobState.OUT_OF_MEMORY,
        JobState.DEADLINE,
        JobState.REQUEUE_HOLD,
        JobState.SPECIAL_EXIT,
        JobState.LAUNCH_FAILED,
    }
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job's displayed values; None where unknown or meaningless.

    Attributes:
        job, facts: sources of the rest.
        job_id: as Slurm prints it: ``12_3`` for an array element, ``12_[4-9%1]`` for those that
            have not started.
        state: Slurm's; or PARKED (all ranks) and STOPPING, which only its ranks know; or
            FORGOTTEN: it has ended, and Slurm has forgotten how.
        parked, ranks: counts in this attempt.
        commit_step, commit_age_s: newest durable checkpoint.
        size: members of an elastic job that train now, that are wanted, and at most.
        pauses: number of pauses in this attempt.
        left_s: until its time limit.
        stuck: no step for a long time, or no heartbeat from the first rank.
    """

    job: Job
    facts: RunFacts
    job_id: str
    state: str
    reason: str
    parked: int | None = None
    ranks: int | None = None
    size: tuple[int, int, int] | None = None
    step: int | None = None
    steps_per_s: float | None = None
    commit_step: int | None = None
    commit_age_s: float | None = None
    pauses: int | None = None
    vacated_bytes: int = 0
    left_s: float | None = None
    loss: WorkAtRisk | None = None
    stuck: bool = False
    forgotten: bool = False

    @property
    def is_over(self) -> bool:
        return self.forgotten or self.job.state.has_ended

    @property
    def goodput(self) -> float | None:
        return None if self.facts.goodput is None else self.facts.goodput.of_allocated

    def attention(self) -> tuple[object, ...]:
        """Sort key, most urgent first: jobs that lose work and cannot save, that failed or hang, or
        would lose most; then running, waiting and ended ones."""
        held = self.job.state is JobState.SUSPENDED or self.state == "STOPPING"
        at_stake_s = 0.0
        if self.loss is not None and not self.loss.is_nothing:
            at_stake_s = self.loss.seconds or 0.0
        if held and at_stake_s:
            urgency = 0
        elif self.stuck or (self.job.state in LOUD and not self.forgotten):
            urgency = 1
        elif self.loss is not None:
            urgency = 2
        else:
            urgency = 4 if self.is_over else 3
        return (urgency, -at_stake_s, not self.parked, self.job.job_id)

    def as_json(self) -> dict[str, Any]:
        """Return plain values; durations in seconds."""
        loss = self.loss
        size = self.size or (None, None, None)
        return {
            "job": self.job_id,
            "name": self.job.name,
            "user": self.job.user,
            "partition": self.job.partition,
            "state": self.state,
            "slurm_state": self.job.state.value,
            "reason": self.reason,
            "nodes": list(self.job.nodes),
            "parked": self.parked,
            "ranks": self.ranks,
            "step": self.step,
            "steps_per_s": self.steps_per_s,
            "commit_step": self.commit_step,
            "commit_age_s": self.commit_age_s,
            "preemptions": self.job.restart_count,
            "pauses": self.pauses,
            "vacated_bytes": self.vacated_bytes,
            "goodput": self.facts.goodput and vars(self.facts.goodput),
            "slow_ranks": [rank._asdict() for rank in self.facts.slow],
            "left_s": self.left_s,
            "lost_steps": loss.steps if loss else None,
            "lost_s": loss.seconds if loss else None,
            "lost_why": loss.why if loss else None,
            "stuck": self.stuck,
            "size": size[0],
            "size_wanted": size[1],
            "size_max": size[2],
        }


def row_of(
    job: Job,
    facts: RunFacts,
    policy: SitePolicy | None,
    *,
    now_epoch_s: float,
    forgotten: bool = False,
) -> Row:
    """Build the row of one job."""
    alive = not (forgotten or job.state.has_ended or job.state.is_waiting)
    commit = facts.commit
    has_ranks = alive and bool(facts.ranks)
    return Row(
        job=job,
        facts=facts,
        job_id=str(job.id),
        state="FORGOTTEN" if forgotten else _state(job, facts),
        reason="" if job.reason in ("None", "") else job.reason,
        parked=facts.parked if has_ranks else None,
        ranks=facts.n_ranks if has_ranks else None,
        size=facts.size if alive else None,
        step=facts.step if facts.step is not None else (commit[0] if commit else None),
        steps_per_s=_rate(job, facts, now_epoch_s=now_epoch_s) if alive else None,
        commit_step=commit[0] if commit else None,
        commit_age_s=max(0.0, now_epoch_s - commit[1] / 1e9) if commit else None,
        pauses=max(rank.pauses for rank in facts.ranks) if has_ranks else None,
        vacated_bytes=facts.vacated_bytes if has_ranks else 0,
        left_s=max(0.0, job.end_epoch_s - now_epoch_s) if alive and job.end_epoch_s else None,
        loss=loss_now(job, facts, policy, now_epoch_s=now_epoch_s) if alive else None,
        stuck=alive and job.state is JobState.RUNNING and _is_stuck(facts, now_epoch_s=now_epoch_s),
        forgotten=forgotten,
    )


def _state(job: Job, facts: RunFacts) -> str:
    if job.state is JobState.RUNNING and facts.ranks:
        if facts.stopping:
            return "STOPPING"
        if facts.parked == len(facts.ranks):
            return "VACATED" if facts.vacated_bytes else "PARKED"
    return job.state.value


def _rate(job: Job, facts: RunFacts, *, now_epoch_s: float) -> float | None:
    """Return 0 while all ranks are held or nothing moves, otherwise the last measurement."""
    if facts.steps_per_s is None:
        return None
    held = job.state is JobState.SUSPENDED or (facts.parked and facts.parked == len(facts.ranks))
    return 0.0 if held or _is_stuck(facts, now_epoch_s=now_epoch_s) else facts.steps_per_s


def _is_stuck(facts: RunFacts, *, now_epoch_s: float) -> bool:
    if not facts.steps_per_s or facts.step_epoch_ns is None or facts.parked:
        return False
    silent_s = now_epoch_s - facts.step_epoch_ns / 1e9
    # a shared file system may show writes a minute late
    if facts.told_every_s is not None and silent_s > STUCK_S + 3.0 * facts.told_every_s:
        return True
    return facts.stuck_s > max(STUCK_S, 10.0 / facts.steps_per_s)


# --- work that a preemption now would lose: an upper bound, or 0 ---------------------------------

_HAS_PROCESSES = frozenset(
    {JobState.RUNNING, JobState.SUSPENDED, JobState.STOPPED, JobState.RESIZING}
)


@dataclass(frozen=True)
class WorkAtRisk:
    """Work that would be lost.

    Attributes:
        why: the reason, in a few words.
        steps: upper bound; None if steps are not reported.
        seconds: upper bound of the work's time; None if even that is unknown.
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
    """Estimate the cost of a preemption now; None for a job that waits or has ended, with nothing
    to lose.

    Args:
        policy: the site's for this job; None if it could not be asked.
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
    left_s = policy.time_left(StopReason.PREEMPTED).seconds
    if policy.action is PreemptAction.NEVER:
        left_s = policy.kill_after_s  # an operator's stop leaves least
    needs_s = _step_s(facts) + SAFETY * facts.save_s
    if needs_s <= left_s:
        return WorkAtRisk(f"a save takes {facts.save_s:.1f} s, and has {left_s:.0f} s", 0, 0.0)
    message = f"a step and a save may take {needs_s:.0f} s, and have {left_s:.0f} s"
    return WorkAtRisk(message, unsaved.steps, unsaved.seconds)


def unsaved_steps(facts: RunFacts, *, now_epoch_s: float) -> int | None:
    """Estimate the steps since the newest durable checkpoint, including those since the rank's
    last report; None if steps or checkpoints are not reported."""
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
    # with only an earlier attempt's checkpoint, work before this attempt is not at stake
    begins_s = max((s for s in (since_ns and since_ns / 1e9, start_s) if s), default=None)
    seconds = None if begins_s is None else max(0.0, now_epoch_s - begins_s)
    steps = unsaved_steps(facts, now_epoch_s=now_epoch_s) if facts.has_run else None
    return WorkAtRisk(why if seconds is not None else "its start is not known", steps, seconds)


def _step_s(facts: RunFacts) -> float:
    """Bound the time to the next safe point."""
    if facts.steps_per_s:
        return max(1.0 / facts.steps_per_s, facts.stuck_s)
    return facts.stuck_s if facts.stuck_s or facts.steps_per_s is None else math.inf
