"""Ending a cluster: no process and no file outside of its folder is left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence

from hydroslurm.devcluster import cgroups
from hydroslurm.devcluster.bringup import CLUSTER_ENV
from hydroslurm.devcluster.layout import Layout, remove_link
from hydroslurm.devcluster.processes import (
    Daemon,
    ProcessId,
    command_name,
    descendants,
    end,
    environment,
    find,
    holds_file_below,
    reap,
)
from hydroslurm.devcluster.running import Running
from hydroslurm.devcluster.spec import ClusterSpec

_JOBS_END_S = 1.5
_CANCEL_LIMIT_S = 5.0
_SWEEPS = 5


def cancel_jobs(scancel: str, *, user: str, environ: Mapping[str, str]) -> None:
    """Cancel all jobs, and give them a moment to end by themselves.

    Not the whole of KillWait: what is still there after 1.5 s is killed with everything else.
    """
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run(
            [scancel, f"--user={user}"],
            env=dict(environ),
            capture_output=True,
            timeout=_CANCEL_LIMIT_S,
            check=False,
        )
    deadline = time.monotonic() + _JOBS_END_S
    while _job_steps() and time.monotonic() < deadline:
        time.sleep(0.02)


def end_all(daemons: Sequence[Daemon], spec: ClusterSpec, *, limit_s: float = 15.0) -> None:
    """Kill every process below this one, a subreaper, until there is none.

    By SIGKILL, the daemons too: what they would save is about to be removed. Again and again,
    because a process may fork between the look and the kill. Then the cgroups that they were in.
    """
    deadline = time.monotonic() + limit_s
    while below := [p for pid in descendants(os.getpid()) if (p := ProcessId.of(pid))]:
        cgroups.thaw(spec)
        end(below, limit_s=1.0)
        reap(daemons)
        if time.monotonic() > deadline:
            break
    reap(daemons)
    cgroups.remove(spec)


def sweep(layout: Layout, running: Running) -> None:
    """End and remove what a cluster left behind whose supervisor was killed.

    The daemons died with their supervisor; job steps and tasks have not. A shell that only points
    at the cluster (`hydroslurm cluster env`) is no task and stays.
    """
    end(process for _, process in running.daemons)
    for _ in range(_SWEEPS):  # a process may fork between the look and the kill
        if strays := _strays(layout, running):
            cgroups.thaw(running.spec)
            end(strays)
    cgroups.remove(running.spec)
    remove_link(running.link)
    layout.remove_state()
    if running.temporary:
        layout.remove_all()


def _strays(layout: Layout, running: Running) -> list[ProcessId]:
    """The job steps of a cluster without a supervisor, and all that they have started.

    A task is known by the environment that slurmd and sbatch gave it. slurmstepd is too up to
    24.05; newer ones empty theirs (seen on 25.11). But each of them, and nobody else of that name,
    has its node's log in the cluster's folder open. With cgroups everything is in one.
    """
    confs = {str(layout.slurm_conf), str(running.link / "conf/slurm.conf")}
    root = layout.root.resolve()

    def ours(pid: int) -> bool:
        environ = environment(pid)
        is_task = (
            environ.get("SLURM_CONF") in confs
            and "SLURM_JOB_ID" in environ
            and environ.get("SLURMD_NODENAME") in running.spec.node_names
        )
        if is_task or environ.get(CLUSTER_ENV) == str(layout.root):
            return True
        return command_name(pid) == "slurmstepd" and holds_file_below(pid, root)

    found = {*find(ours), *cgroups.processes_of(running.spec)}
    below = {child for pid in found for child in descendants(pid)}
    return [p for pid in (found | below) - {os.getpid()} if (p := ProcessId.of(pid))]


def _job_steps() -> bool:
    return any(command_name(pid) == "slurmstepd" for pid in descendants(os.getpid()))
