"""One job as a line of ``top``, from Slurm's answer and its run folder's facts, and the work that a
preemption now would lose. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
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


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job at one moment; its values are None where unknown or meaningless.

    Attributes:
        policy: the site's for this job; None if it could not be asked.
        forgotten: it has ended, and Slurm has forgotten how.
    """

    job: Job
    facts: RunFacts
    policy: SitePolicy | None
    now_epoch_s: float
    forgotten: bool = False

    @property
    def is_over(self) -> bool:
        return self.forgotten or self.job.state.has_ended

    @property
    def _is_alive(self) -> bool:
        return not (self.is_over or self.job.state.is_waiting)

    @property
    def _has_ranks(self) -> bool:
        return self._is_alive and bool(self.facts.ranks)

    @property
    def job_id(self) -> str:
        """As Slurm prints it: ``12_3`` for an array element, ``12_[4-9%1]`` for those that have not
        started."""
        return str(self.job.id)

    @property
    def state(self) -> str:
        """Slurm's; or PARKED (all ranks), VACATED and STOPPING, which only its ranks know; or
        FORGOTTEN."""
        if self.forgotten:
            return "FORGOTTEN"
        facts = self.facts
        if self.job.state is JobState.RUNNING and facts.ranks:
            if facts.stopping:
                return "STOPPING"
            if facts.parked == len(facts.ranks):
                return "VACATED" if facts.vacated_bytes else "PARKED"
        return self.job.state.value

    @property
    def reason(self) -> str:
        return "" if self.job.reason in ("None", "") else self.job.reason

    @property
    def parked(self) -> int | None:
        return self.facts.parked if self._has_ranks else None

    @property
    def ranks(self) -> int | None:
        return self.facts.n_ranks if self._has_ranks else None

    @property
    def size(self) -> tuple[int, int, int] | None:
        """Members of an elastic job that train now, that are wanted, and at most."""
        return self.facts.size if self._is_alive else None

    @property
    def step(self) -> int | None:
        return self.commit_step if self.facts.step is None else self.facts.step

    @property
    def steps_per_s(self) -> float | None:
        """0 while all ranks are held or nothing moves, otherwise the last measurement."""
        facts = self.facts
        if facts.steps_per_s is None or not self._is_alive:
            return None
        is_suspended = self.job.state is JobState.SUSPENDED
        held = is_suspended or (facts.parked and facts.parked == len(facts.ranks))
        return 0.0 if held or self._stands_still else facts.steps_per_s

    @property
    def commit_step(self) -> int | None:
        """Of the newest durable checkpoint."""
        return self.facts.commit[0] if self.facts.commit else None

    @property
    def commit_age_s(self) -> float | None:
        commit = self.facts.commit
        return max(0.0, self.now_epoch_s - commit[1] / 1e9) if commit else None

    @property
    def pauses(self) -> int | None:
        """In this attempt."""
        return max(rank.pauses for rank in self.facts.ranks) if self._has_ranks else None

    @property
    def vacated_bytes(self) -> int:
        return self.facts.vacated_bytes if self._has_ranks else 0

    @property
    def goodput(self) -> float | None:
        return None if self.facts.goodput is None else self.facts.goodput.of_allocated

    @property
    def left_s(self) -> float | None:
        """Until its time limit."""
        end_s = self.job.end_epoch_s
        return max(0.0, end_s - self.now_epoch_s) if self._is_alive and end_s else None

    @property
    def stuck(self) -> bool:
        """No step for a long time, or no heartbeat from the first rank."""
        is_running = self._is_alive and self.job.state is JobState.RUNNING
        return is_running and self._stands_still

    @cached_property
    def _stands_still(self) -> bool:
        facts = self.facts
        if not facts.steps_per_s or facts.step_epoch_ns is None or facts.parked:
            return False
        silent_s = self.now_epoch_s - facts.step_epoch_ns / 1e9
        # a shared file system may show writes a minute late
        if facts.told_every_s is not None and silent_s > STUCK_S + 3.0 * facts.told_every_s:
            return True
        return facts.stuck_s > max(STUCK_S, 10.0 / facts.steps_per_s)

    @property
    def unsaved_steps(self) -> int | None:
        """Estimate of the steps since the newest durable checkpoint, including those since the
        rank's last report; None if steps or checkpoints are not reported."""
        facts, base = self.facts, self.facts.commit or self.facts.began
        if base is None or facts.step is None or facts.step_epoch_ns is None:
            return None
        silent_s = max(0.0, self.now_epoch_s - facts.step_epoch_ns / 1e9)
        since_s = 0.0 if facts.parked else silent_s
        return max(0, facts.step - base[0]) + math.ceil((facts.steps_per_s or 0.0) * since_s)

    @cached_property
    def loss(self) -> WorkAtRisk | None:
        """Work that a preemption now would lose: an upper bound, or 0; None for a job that waits or
        has ended, with nothing to lose."""
        facts, policy = self.facts, self.policy
        if self.forgotten or self.job.state not in _HAS_PROCESSES:
            return None
        if policy is not None and policy.action is PreemptAction.PAUSE:
            return WorkAtRisk("a preemption pauses it in place", 0, 0.0)
        unsaved = self._unsaved
        if self.job.state is not JobState.RUNNING:
            return replace(unsaved, why="a suspended job hears no signal but SIGKILL")
        if not facts.has_run:
            return unsaved
        if policy is None:
            return replace(unsaved, why="this site's grace is not known")
        if facts.save_s is None:
            return replace(unsaved, why="how long a save takes is not known yet")
        left_s = policy.time_left(StopReason.PREEMPTED).seconds
        if policy.action is PreemptAction.NEVER:
            left_s = policy.kill_after_s  # an operator's stop leaves least
        needs_s = self._step_s + SAFETY * facts.save_s
        if needs_s <= left_s:
            return WorkAtRisk(f"a save takes {facts.save_s:.1f} s, and has {left_s:.0f} s", 0, 0.0)
        message = f"a step and a save may take {needs_s:.0f} s, and have {left_s:.0f} s"
        return replace(unsaved, why=message)

    @property
    def _unsaved(self) -> WorkAtRisk:
        facts = self.facts
        if facts.has_run or facts.commit:
            why = "since the last commit" if facts.commit else "nothing is committed yet"
        else:
            why = "all since its start, but for what it saves itself"
        # with only an earlier attempt's checkpoint, work before this attempt is not at stake
        commit_s = facts.commit[1] / 1e9 if facts.commit else None
        begins_s = max((s for s in (commit_s, self.job.start_epoch_s) if s), default=None)
        seconds = None if begins_s is None else max(0.0, self.now_epoch_s - begins_s)
        steps = self.unsaved_steps if facts.has_run else None
        return WorkAtRisk(why if seconds is not None else "its start is not known", steps, seconds)

    @property
    def _step_s(self) -> float:
        """Bound on the time to the next safe point."""
        facts = self.facts
        if facts.steps_per_s:
            return max(1.0 / facts.steps_per_s, facts.stuck_s)
        return facts.stuck_s if facts.stuck_s or facts.steps_per_s is None else math.inf

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
        job, loss, size = self.job, self.loss, self.size or (None, None, None)
        names = ("parked", "ranks", "step", "steps_per_s", "commit_step", "commit_age_s")
        return {
            "job": self.job_id,
            "name": job.name,
            "user": job.user,
            "partition": job.partition,
            "state": self.state,
            "slurm_state": job.state.value,
            "reason": self.reason,
            "nodes": list(job.nodes),
            **{name: getattr(self, name) for name in names},
            "preemptions": job.restart_count,
            "pauses": self.pauses,
            "vacated_bytes": self.vacated_bytes,
            "goodput": self.facts.goodput and vars(self.facts.goodput),
            "slow_ranks": [rank._asdict() for rank in self.facts.slow],
            "left_s": self.left_s,
            "lost_steps": loss.steps if loss else None,
            "lost_s": loss.seconds if loss else None,
            "lost_why": loss.why if loss else None,
            "stuck": self.stuck,
            **dict(zip(("size", "size_wanted", "size_max"), size, strict=True)),
        }
