"""One job as a line of ``top``, from Slurm's answer and the facts in its run folder. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydroslurm.observe.folder import RunFacts
from hydroslurm.observe.work_at_risk import WorkAtRisk, loss_now
from hydroslurm.slurm.policy import SitePolicy
from hydroslurm.slurm.values import Job, JobState

STUCK_S = 60.0
"""A step that takes this long, and ten times as long as those before it, is worth a look; so is a
heartbeat that is overdue by this much."""
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
    """What is shown of one job; None where it is not known or makes no sense.

    Attributes:
        job, facts: what the rest was made from.
        job_id: as Slurm prints it: ``12_3`` for an element of an array, ``12_[4-9%1]`` for those
            that have not started.
        state: Slurm's; or PARKED (all ranks) and STOPPING, which only its
            ranks know; or FORGOTTEN: it has ended, and Slurm does not remember how.
        parked, ranks: of this attempt.
        commit_step, commit_age_s: newest durable checkpoint.
        size: members of an elastic job that train now, that are wanted, and at most.
        pauses: how often it was paused in this attempt.
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

    def attention(self) -> tuple[object, ...]:
        """Sorts the job that needs somebody first: what loses work while it cannot be saved, what
        failed or stands still, what would lose the most; then what runs, waits, has ended."""
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
        """Plain values; durations in seconds."""
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
    """Put a line together."""
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
    """Zero while all ranks are held or nothing moves; what was measured last otherwise."""
    if facts.steps_per_s is None:
        return None
    held = job.state is JobState.SUSPENDED or (facts.parked and facts.parked == len(facts.ranks))
    return 0.0 if held or _is_stuck(facts, now_epoch_s=now_epoch_s) else facts.steps_per_s


def _is_stuck(facts: RunFacts, *, now_epoch_s: float) -> bool:
    if not facts.steps_per_s or facts.step_epoch_ns is None or facts.parked:
        return False
    silent_s = now_epoch_s - facts.step_epoch_ns / 1e9
    # a shared file system may show what was written a minute late
    if facts.told_every_s is not None and silent_s > STUCK_S + 3.0 * facts.told_every_s:
        return True
    return facts.stuck_s > max(STUCK_S, 10.0 / facts.steps_per_s)
