"""A shell beside a replica or a rank: another job step in its allocation, sharing its CPUs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.proc import module_command
from hydroslurm.errors import UsageError, WrongJobState
from hydroslurm.jobs.attached import PROCESS
from hydroslurm.observe.job import JobView
from hydroslurm.observe.logs import no_replica, plan_of, replica_of
from hydroslurm.slurm.values import Job, JobState


def attach_command(
    found: JobView,
    *,
    replica: str | None,
    command: Sequence[str],
    environ: Mapping[str, str],
    has_terminal: bool,
) -> list[str]:
    """The srun command that starts it.

    Args:
        found: the job.
        replica: such as ``worker-2``; without a spec ``rank-2``. None: the master, or rank 0.
        command: empty for the shell of ``environ``.
        environ: of the user who attaches.
        has_terminal: whether the command gets one.

    Raises:
        WrongJobState: the job does not run.
        UsageError: it has no such replica, or no rank has announced where it is.
    """
    if found.slurm is None or found.slurm.state is not JobState.RUNNING:
        state = "unknown to Slurm" if found.slurm is None else found.slurm.state.value
        raise WrongJobState(f"the job is {state}; a shell can be had only while it is RUNNING")
    if found.has_spec:
        node, beside = _of_plan(found, found.slurm, replica)
    else:
        node, beside = _of_rank(found, found.slurm, replica)
    return [
        "srun",
        f"--jobid={found.slurm.job_id}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        "--chdir=/",  # the caller's folder need not be there
        *(["--pty"] if has_terminal else []),
        *module_command(sys.executable, "hydroslurm.jobs.attached"),
        *beside,
        *(command or (environ.get("SHELL") or "/bin/sh",)),
    ]


def _of_plan(found: JobView, slurm: Job, replica: str | None) -> tuple[str, list[str]]:
    """The node of a replica, and what ``beside`` needs to find it there."""
    plan = plan_of(found)
    name = replica_of(plan, replica)
    number = next(n for n, task in enumerate(plan.tasks) if task.replica == name)
    return slurm.nodes[plan.tasks[number].node], [str(found.run.plan_json), str(number)]


def _of_rank(found: JobView, slurm: Job, replica: str | None) -> tuple[str, list[str]]:
    """The same for a rank, which has announced its node. On a job of one node that is not needed: a
    shell is possible before the ranks are up, or if they have no torch."""
    here = {f"rank-{rank}": event for rank, event in _announced(found, slurm).items()}
    name = replica or "rank-0"
    if name in here:
        node, pid = here[name].data.get("node_name"), here[name].pid
    elif replica is None and len(slurm.nodes) == 1:
        node, pid = slurm.nodes[0], 0
    elif replica is not None and here:
        raise no_replica(replica, list(here))
    else:
        raise UsageError(
            f"no rank of job {slurm.id} has said where it is, in {found.run.events}: it may "
            f"still be starting. srun --jobid={slurm.job_id} --overlap --pty --nodelist=NODE bash "
            f"gives a shell on one of {', '.join(slurm.nodes[:20])}"
        )
    if node not in slurm.nodes:  # anybody may have written it
        raise UsageError(f"{name} says that it is on {node!r}, which is no node of the job")
    return node, [PROCESS, str(pid)]


def _announced(found: JobView, slurm: Job) -> dict[int, Event]:
    """Rank -> how it announced itself in the present attempt."""
    return {
        rank: event
        for rank, path in found.run.rank_event_files().items()
        for event in read_events(path, kinds=(EventKind.INSTALLED,))
        if (event.job_id, event.restart_count) == (slurm.job_id, slurm.restart_count)
    }
