"""What slurmctld is asked when many jobs start, are preempted or are requeued at one moment.

50 real jobs on a dev cluster of 4 nodes: started, then preempted together with a grace, and others
requeued together by an operator. Their job steps ignore SIGTERM, and note when it comes; what a
rank does then, its own StopHandler does in this process, one for each job: fifty processes with a
torch each do not fit into one machine.

Counted are the requests of programs like ours (sdiag -r before), per job: `rpcs_per_start_alone`
per start, `rpcs_per_stop` of the dearer of the two storms, and `sacct_per_stop`. `storm_1000_s` is
extrapolated: a thousand stops at the rate at which slurmctld answered `scontrol show job` here,
programs' starts included.
"""

from __future__ import annotations

import os
import re
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import finish, installed, options, scratch
from processes import wait_until

from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.runtime.controller import Controller, StopRequest
from hydroslurm.runtime.install import controller as installed_controller
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.requeue import StopHandler

NODES = 4
RATE_S = 3.0
LIMIT_S = 180.0
_OURS = re.compile(
    r"(REQUEST_(?:JOB_INFO|JOB_INFO_SINGLE|JOB_USER_INFO|FED_INFO|BUILD_INFO|PING|PARTITION_INFO|"
    r"NODE_INFO|NODE_INFO_SINGLE|JOB_REQUEUE|UPDATE_JOB))\s+\(\s*\d+\) count:(\d+)"
)
_STEP = "trap 'date > {folder}/told-$SLURM_JOB_ID' TERM; touch {folder}/up-$SLURM_JOB_ID; {sleep}"


@dataclass(frozen=True)
class Rank:
    """The part of a job's first rank that talks to Slurm."""

    job_id: int
    handler: StopHandler

    def stop(self) -> int:
        """As a Run does at its safe point, after a save that took no time; the exit status."""
        self.handler.note_request(StopRequest("SIGTERM", 0, time.monotonic_ns(), time.time_ns()))
        return int(self.handler.requeue(self.handler.plan()).code or 0)


class Storm:
    """Real jobs of one cluster, with their ranks."""

    def __init__(self, cluster: DevCluster, folder: Path, controller: Controller) -> None:
        self._cluster = cluster
        self._folder = folder
        self._controller = controller
        programs = folder / "programs"
        programs.mkdir()
        self._sacct = folder / "sacct.log"
        self._sacct.touch()
        self.array = ""
        """The id of all jobs together."""
        environ = cluster.child_environ()
        counted = programs / "sacct"
        counted.write_text(
            f'#!/bin/sh\necho "$*" >> {self._sacct}\nPATH={environ["PATH"]} exec sacct "$@"\n'
        )
        counted.chmod(0o755)
        self._environ = {**environ, "PATH": f"{programs}:{environ['PATH']}"}

    def submit(self, count: int) -> list[int]:
        """So many jobs, all of them running."""
        step = _STEP.format(folder=self._folder, sleep="while :; do sleep 0.2; done")
        wrap = f'srun bash -c "{step}"'.replace("$", "\\$")
        words = ["-p", "low", "-n1", "--acctg-freq=0", "-o", "/dev/null", "-D", str(self._folder)]
        argv = ["sbatch", "--parsable", f"--array=0-{count - 1}", *words, "--wrap", wrap]
        self.array = self._cluster.run(argv).stdout.strip()

        def up() -> list[int]:
            return sorted(int(one.name[3:]) for one in self._folder.glob("up-*"))

        wait_until(lambda: len(up()) == count, f"{count} jobs", limit_s=LIMIT_S)
        return up()

    def start(self, job_ids: Sequence[int]) -> list[Rank]:
        """Their ranks, when all have asked what they ask at a start."""
        ranks = []
        for job_id in job_ids:
            environ = {**self._environ, "SLURM_JOB_ID": str(job_id)}
            allocation = Allocation(job_id=job_id)
            ranks.append(Rank(job_id, StopHandler(allocation, self._controller, environ=environ)))
        handlers = [rank.handler for rank in ranks]
        wait_until(
            lambda: all(one._policies is not None for one in handlers), "settings", limit_s=LIMIT_S
        )
        return ranks

    def stop(self, ranks: Sequence[Rank]) -> float:
        """Each as soon as its job step is told; seconds from the first to the last that left."""

        def follow(rank: Rank) -> int:
            told = self._folder / f"told-{rank.job_id}"
            wait_until(told.exists, f"SIGTERM for job {rank.job_id}", limit_s=LIMIT_S)
            return rank.stop()

        with ThreadPoolExecutor(len(ranks)) as pool:
            begin_s = time.monotonic()
            statuses = set(pool.map(follow, ranks))
        if statuses != {75}:
            raise RuntimeError(f"the ranks left with {statuses}, wanted 75, run again")
        return time.monotonic() - begin_s

    def forget(self) -> None:
        """End all jobs, and all that was counted."""
        self._cluster.run(["scancel", "-u", str(os.getuid())], check=False)
        asked = ["squeue", "-h", "-o", "%i"]
        wait_until(lambda: not self._cluster.run(asked).stdout.strip(), "no job", limit_s=LIMIT_S)
        for file in (*self._folder.glob("up-*"), *self._folder.glob("told-*")):
            file.unlink()

    def reset(self) -> None:
        self._cluster.run(["sdiag", "-r"])
        self._sacct.write_text("")

    def requests(self) -> int:
        """Since :meth:`reset`."""
        return sum(int(count) for _, count in _OURS.findall(self._cluster.run(["sdiag"]).stdout))

    def sacct_calls(self) -> int:
        return len(self._sacct.read_text().splitlines())

    def rate_per_s(self, job_id: int) -> float:
        """Requests that slurmctld answers, of programs that run side by side."""
        until_s = time.monotonic() + RATE_S

        def ask(_: int) -> None:
            while time.monotonic() < until_s:
                self._cluster.run(["scontrol", "--local", "show", "job", str(job_id)])

        self.reset()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))
        return self.requests() / RATE_S


def measure(chosen: Namespace, folder: Path) -> dict[str, Any]:
    count = 6 if chosen.quick else 50
    cpus = -(-count // NODES)
    spec = ClusterSpec(
        nodes=NODES, cpus_per_node=cpus, profile="requeue", grace_s=60, kill_wait_s=5
    )
    result: dict[str, Any] = {"jobs": count}
    with installed(folder / "run"), DevCluster.up(spec) as cluster:
        storm = Storm(cluster, folder, installed_controller())
        for name in ("preempted", "requeued"):
            job_ids = storm.submit(count)
            storm.reset()
            ranks = storm.start(job_ids)
            result["rpcs_per_start_alone"] = storm.requests() / count
            storm.reset()
            if name == "preempted":
                urgent = ["-p", "urgent", f"-N{NODES}", "--exclusive", "-o", "/dev/null"]
                cluster.run(["sbatch", *urgent, "--wrap", "sleep 600"])
                own = 0
            else:
                cluster.run(["scontrol", "requeue", storm.array])
                own = storm.requests()
            result[f"storm_{name}_s"] = storm.stop(ranks)
            result[f"rpcs_per_stop_{name}"] = (storm.requests() - own) / count
            result[f"sacct_per_stop_{name}"] = storm.sacct_calls() / count
            if name == "requeued":
                result["rpcs_per_s"] = storm.rate_per_s(job_ids[0])
            storm.forget()
    both = ("preempted", "requeued")
    result["rpcs_per_stop"] = max(result[f"rpcs_per_stop_{name}"] for name in both)
    result["sacct_per_stop"] = max(result[f"sacct_per_stop_{name}"] for name in both)
    result["storm_1000_s"] = 1000 * result["rpcs_per_stop"] / result["rpcs_per_s"]
    return result


def main() -> None:
    chosen = options("What slurmctld is asked when many jobs stop at one moment.")
    with scratch("storm", chosen) as folder:
        result = measure(chosen, folder)
    finish(chosen, "storm: requests to slurmctld per start and per stop", result)


if __name__ == "__main__":
    main()
