"""End a cluster: no process and no file outside its folder is left."""

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
    """Cancel all jobs, and give them 1.5 s to end.

    Not all of KillWait: what still runs is killed with everything else.
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
    """Kill all descendants of this process, a subreaper, and remove their cgroups.

    With SIGKILL, daemons too: what they would save is about to be removed. Until two looks in a row
    find nobody: a process may fork while it is being listed, and be gone when its parent is asked.
    """
    deadline = time.monotonic() + limit_s
    looks_without_any = 0
    while looks_without_any < 2 and time.monotonic() < deadline:
        below = [p for pid in descendants(os.getpid()) if (p := ProcessId.of(pid))]
        looks_without_any = 0 if below else looks_without_any + 1
        cgroups.thaw(spec)
        end(below, limit_s=1.0)
        reap(daemons)
    cgroups.remove(spec)


def sweep(layout: Layout, running: Running) -> None:
    """End and remove what is left of a cluster whose supervisor was killed.

    The daemons died with their supervisor, but job steps and tasks did not. A shell that only
    points to the cluster (`hydroslurm cluster env`) is not a task and stays.
    """
    end(process for _, process in running.daemons)
    for _ in range(_SWEEPS):  # a process may fork before it is killed
        if strays := _strays(layout, running):
            cgroups.thaw(running.spec)
            end(strays)
    cgroups.remove(running.spec)
    remove_link(running.link)
    layout.remove_state()
    if running.temporary:
        layout.remove_all()


def _strays(layout: Layout, running: Running) -> list[ProcessId]:
    """The job steps of a cluster without a supervisor, and their descendants.

    Tasks are recognized by the environment that slurmd and sbatch gave them. So is slurmstepd up to
    24.05; newer ones empty theirs (seen on 25.11), but each has its node's log in the cluster's
    folder open. With cgroups, the cgroup lists them all.
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
