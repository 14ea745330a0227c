"""What each replica of a TrainingJob is doing, as srun and the ledger of attempts tell it."""

from __future__ import annotations

from collections.abc import Mapping

from hydroslurm.jobs.launch.overview import Overview
from hydroslurm.jobs.launch.plan import Plan
from hydroslurm.jobs.supervisor.exit_policy import status_words
from hydroslurm.jobs.supervisor.steps import Ends
from hydroslurm.slurm.values import JobState


def replica_states(found: Overview) -> dict[str, str]:
    """Replica -> words such as ``running`` and ``ended with status 137 (SIGKILL)``, of the latest
    attempt, in the order of ranks."""
    if found.plan is None:
        return {}
    if not found.attempts:
        return dict.fromkeys(found.plan.replicas, "not started yet")
    attempt = found.attempts[-1]
    ends = Ends(found.run.srun_log(attempt.number))
    ends.look()
    if attempt.ending is not None:
        otherwise = f"ended with attempt {attempt.number} ({attempt.ending.value})"
    else:
        otherwise = _unended(found)
    return {
        name: _state(found.plan, name, ends.statuses, otherwise) for name in found.plan.replicas
    }


def _unended(found: Overview) -> str:
    """Of an attempt whose end nobody has written down."""
    state = None if found.slurm is None else found.slurm.state
    if state is None or state in (JobState.RUNNING, JobState.SUSPENDED):
        return "running" if state is not JobState.SUSPENDED else "suspended"
    return "ended with the job" if state.has_ended else "interrupted"


def _state(plan: Plan, name: str, statuses: Mapping[int, int], otherwise: str) -> str:
    own = [number for number, task in enumerate(plan.tasks) if task.replica == name]
    ended = [statuses[number] for number in own if number in statuses]
    if len(ended) < len(own):
        return otherwise
    return f"ended with status {status_words(max(ended))}"
