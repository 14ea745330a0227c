"""What a rank reports about its job step, for commands that signal the job step from outside.

``scancel`` signals job steps, never single processes, and the login node cannot see /proc of a
compute node. So each rank looks once, when it is installed, and reports what it finds: which task
of how many it belongs to, and which processes between it and slurmstepd a signal would kill.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hydroslurm.core.proc import status_of
from hydroslurm.runtime.autoload import is_asked
from hydroslurm.slurm.allocation import Allocation

_DAEMON = "slurmstepd"
_MOST_ANCESTORS = 64


def jobstep_of(environ: Mapping[str, str], signals: Collection[int]) -> dict[str, object]:
    """Fields for the ``installed`` event; empty outside of a job.

    ``node_name``: Slurm's. ``step_id``: None for a process of the batch shell. ``task`` of
    ``step_tasks``. ``held``: tasks that are not installed yet survive ``signals`` too. ``deaf``:
    ancestors that would not.
    """
    allocation = Allocation.from_environ(environ)
    if allocation is None:
        return {}
    node = environ.get("SLURMD_NODENAME")
    if allocation.step_id is None:
        return {"node_name": node, "step_id": None}
    # below torchrun or an agent RANK counts the ranks, and these the tasks
    return {
        "node_name": node,
        "step_id": allocation.step_id,
        "task": allocation.rank,
        "step_tasks": allocation.world_size,
        "held": is_asked(environ),
        "deaf": _deaf_ancestors(signals),
    }


def _deaf_ancestors(signals: Collection[int]) -> list[str]:
    """The processes between this one and slurmstepd that one of the signals would kill; none if
    slurmstepd is not above us, for then Slurm does not signal them."""
    found: list[str] = []
    pid = "self"
    for _ in range(_MOST_ANCESTORS):
        try:
            status = status_of(pid)
        except OSError:
            return []
        if status["Name"] == _DAEMON:
            return found
        if pid != "self" and _would_die(status, signals):
            found.append(f"{status['Name']} (pid {pid})")
        pid = status["PPid"]
    return []


def _would_die(status: Mapping[str, str], signals: Collection[int]) -> bool:
    """A blocked signal kills nobody: it waits for the program that the process becomes."""
    safe = 0
    for mask in ("SigBlk", "SigIgn", "SigCgt"):
        safe |= int(status.get(mask, "0"), 16)
    return any(not safe >> (signo - 1) & 1 for signo in signals)
