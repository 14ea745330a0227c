"""A shell beside a replica: one more job step in its allocation, which shares its processors."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hydroslurm.errors import WrongJobState
from hydroslurm.launch.follow import plan_of, replica_of
from hydroslurm.launch.overview import Overview
from hydroslurm.slurm.values import JobState


def attach_command(
    found: Overview,
    *,
    replica: str | None,
    command: Sequence[str],
    environ: Mapping[str, str],
    has_terminal: bool,
) -> list[str]:
    """The srun that starts it.

    Args:
        found: the job.
        replica: such as ``worker-2``; None: the master.
        command: nothing: the shell of ``environ``.
        environ: of the person who attaches.
        has_terminal: whether the command gets one.

    Raises:
        WrongJobState: the job does not run.
        UsageError: it has no such replica.
    """
    if found.slurm is None or found.slurm.state is not JobState.RUNNING:
        state = "unknown to Slurm" if found.slurm is None else found.slurm.state.value
        raise WrongJobState(f"the job is {state}; a shell can be had only while it is RUNNING")
    plan = plan_of(found)
    name = replica_of(plan, replica)
    number = next(n for n, task in enumerate(plan.tasks) if task.replica == name)
    node = found.slurm.nodes[plan.tasks[number].node]
    return [
        "srun",
        f"--jobid={found.slurm.job_id}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        "--chdir=/",  # the caller's folder need not be there
        *(["--pty"] if has_terminal else []),
        sys.executable,
        "-m",
        "hydroslurm.launch.beside",
        str(found.run.plan_json),
        str(number),
        *(command or (environ.get("SHELL") or "/bin/sh",)),
    ]
