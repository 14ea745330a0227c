"""The replicas of a job with a spec: how each of them stands in the latest attempt."""

from __future__ import annotations

from collections.abc import Mapping

from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.supervisor.exit_policy import format_status
from hydroslurm.jobs.supervisor.job_step import TaskExits
from hydroslurm.observe.job import JobView
from hydroslurm.slurm.values import JobState


def replica_states(view: JobView) -> dict[str, str]:
    """Replica -> its state in the latest attempt: ``running``, ``ended with status 137 (SIGKILL)``
    and the like, in the order of ranks."""
    if view.plan is None:
        return {}
    if not view.attempts:
        return dict.fromkeys(view.plan.replicas, "not started yet")
    attempt = view.attempts[-1]
    ends = TaskExits(view.run.srun_log(attempt.number))
    ends.look()
    if attempt.ending is not None:
        otherwise = f"ended with attempt {attempt.number} ({attempt.ending.value})"
    else:
        otherwise = _unended(view)
    return {name: _state(view.plan, name, ends.statuses, otherwise) for name in view.plan.replicas}


def _unended(view: JobView) -> str:
    """Of an attempt whose end nobody has written down."""
    state = None if view.slurm is None else view.slurm.state
    if state is None or state in (JobState.RUNNING, JobState.SUSPENDED):
        return "running" if state is not JobState.SUSPENDED else "suspended"
    return "ended with the job" if state.has_ended else "interrupted"


def _state(plan: Plan, name: str, statuses: Mapping[int, int], otherwise: str) -> str:
    own = [number for number, task in enumerate(plan.tasks) if task.replica == name]
    ended = [statuses[number] for number in own if number in statuses]
    if len(ended) < len(own):
        return otherwise
    return f"ended with status {format_status(max(ended))}"
