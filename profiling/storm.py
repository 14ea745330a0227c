"""What slurmctld is asked when many jobs start, and when they are preempted at one moment.

50 real jobs on a dev cluster of 4 nodes: started, then preempted together with a grace. Their job
steps ignore SIGTERM, and note when it comes; what a rank does then, its own StopHandler does in
this process, one for each job: fifty processes with a torch each do not fit into one machine.
Counted are the requests of programs like ours, per job (sdiag -r before).
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import Slurm, finish, installed, options, scratch
from processes import wait_until

from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.runtime.controller import StopRequest
from hydroslurm.runtime.install import controller as installed_controller
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.rank_group import RankGroup
from hydroslurm.training.stopping import StopHandler

NODES = 4
LIMIT_S = 180.0
_OURS = re.compile(
    r"(REQUEST_(?:JOB_INFO|JOB_INFO_SINGLE|JOB_USER_INFO|FED_INFO|BUILD_INFO|PING|PARTITION_INFO|"
    r"NODE_INFO|NODE_INFO_SINGLE|JOB_REQUEUE|UPDATE_JOB))\s+\(\s*\d+\) count:(\d+)"
)
_STEP = (
    "trap 'date > {folder}/told-$SLURM_JOB_ID' TERM; touch {folder}/up-$SLURM_JOB_ID; "
    "while :; do sleep 0.2; done"
)


def submit(slurm: Slurm, folder: Path, count: int) -> list[int]:
    """So many jobs, all of them running."""
    wrap = f'srun bash -c "{_STEP.format(folder=folder)}"'.replace("$", "\\$")
    words = ("-p", "low", "-n1", "--acctg-freq=0", "-o", "/dev/null", "--wrap", wrap)
    slurm.submit(f"--array=0-{count - 1}", *words)

    def up() -> list[int]:
        return sorted(int(path.name[3:]) for path in folder.glob("up-*"))

    wait_until(lambda: len(up()) == count, f"{count} jobs", limit_s=LIMIT_S)
    return up()


def start(cluster: DevCluster, job_ids: Sequence[int]) -> dict[int, StopHandler]:
    """The part of each job's first rank that talks to Slurm, when all have asked what they ask at a
    start."""
    handlers = {}
    for job_id in job_ids:
        environ = {**cluster.child_environ(), "SLURM_JOB_ID": str(job_id)}
        allocation = Allocation(job_id=job_id)
        controller = installed_controller()
        ranks = RankGroup(controller)
        handlers[job_id] = StopHandler(allocation, controller, ranks, environ=environ)

    def have_asked() -> bool:
        return all(handler._job and handler._job._policies for handler in handlers.values())

    wait_until(have_asked, "settings", limit_s=LIMIT_S)
    return handlers


def stop(folder: Path, handlers: dict[int, StopHandler]) -> None:
    """Each as soon as its job step is told, as a Run does at its safe point after a save that took
    no time."""

    def follow(job_id: int) -> int:
        told, handler = folder / f"told-{job_id}", handlers[job_id]
        wait_until(told.exists, f"SIGTERM for job {job_id}", limit_s=LIMIT_S)
        handler.note_request(StopRequest("SIGTERM", 0, time.monotonic_ns(), time.time_ns()))
        return handler.requeue(handler.plan())

    with ThreadPoolExecutor(len(handlers)) as pool:
        statuses = set(pool.map(follow, handlers))
    if statuses != {75}:
        raise RuntimeError(f"the ranks left with {statuses}, wanted 75, run again")


def requests(slurm: Slurm) -> int:
    """Since they were counted last."""
    said = slurm.run("sdiag")
    slurm.run("sdiag", "-r")
    return sum(int(count) for _, count in _OURS.findall(said))


def main() -> None:
    chosen = options("What slurmctld is asked when many jobs stop at one moment.")
    count = 6 if chosen.quick else 50
    spec = ClusterSpec(
        nodes=NODES, cpus_per_node=-(-count // NODES), profile="requeue", grace_s=60, kill_wait_s=5
    )
    with (
        scratch("storm") as folder,
        installed(folder / "run"),
        DevCluster.up(spec) as cluster,
    ):
        slurm = Slurm(cluster, folder)
        job_ids = submit(slurm, folder, count)
        requests(slurm)
        handlers = start(cluster, job_ids)
        of_starts = requests(slurm)
        urgent = ("-p", "urgent", f"-N{NODES}", "--exclusive", "-o", "/dev/null")
        slurm.submit(*urgent, "--wrap", "sleep 600")
        stop(folder, handlers)
        of_stops = requests(slurm)
    result = {
        "jobs": count,
        "rpcs_per_start_alone": of_starts / count,
        "rpcs_per_stop_preempted": of_stops / count,
    }
    finish(chosen, "storm: requests to slurmctld per start and per stop", result)


if __name__ == "__main__":
    main()
