"""From `scontrol suspend` to parked, on a real Slurm.

A training job runs on a dev cluster of its own. The clock starts just before the command is run,
so that starting scontrol, slurmctld, slurmd and the signal are all in it. Slurm sends SIGSTOP two
seconds after SIGTSTP: a rank that has said "parked" while it is not stopped yet has parked before
that.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness import EventTail, finish, options, p50_p99, scratch
from processes import is_stopped, wait_until

from hydroslurm.core.events import EventKind
from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import ClusterSpec, DevCluster

LIMIT_S = 60.0


@dataclass(frozen=True)
class Suspend:
    """One suspend and the resume after it."""

    to_parked_ms: float
    parked_before_sigstop: bool


def submit(cluster: DevCluster, run_dir: RunDir) -> int:
    """Start the job; its Slurm id."""
    run_dir.create()
    script = run_dir.root / "job.sh"
    job = f"{Path(__file__).with_name('victim.py')} hydroslurm {run_dir.root} train 0"
    script.write_text(f"#!/bin/sh\nexec srun --unbuffered {sys.executable} {job}\n")
    where = ["-p", "low", "-n1", "-D", str(run_dir.root), "-o", str(run_dir.logs / "job.log")]
    done = cluster.run(["sbatch", "--parsable", *where, str(script)])
    return int(done.stdout.split(";")[0])


def suspend_and_resume(cluster: DevCluster, job_id: int, events: EventTail) -> Suspend:
    """One round; ends when the job trains again."""
    sent_ns = time.monotonic_ns()
    command = _scontrol(cluster, "suspend", job_id)
    parked = events.until(EventKind.PARKED, limit_s=LIMIT_S)
    in_time = not is_stopped(parked.pid)
    _finished(command)
    wait_until(lambda: is_stopped(parked.pid), "the job is stopped")
    command = _scontrol(cluster, "resume", job_id)
    events.until(EventKind.FIRST_OPERATOR_RELEASED, limit_s=LIMIT_S)
    _finished(command)
    return Suspend(
        to_parked_ms=(parked.mono_ns - sent_ns) / 1e6,
        parked_before_sigstop=in_time,
    )


def _scontrol(cluster: DevCluster, verb: str, job_id: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["scontrol", verb, str(job_id)],
        env=cluster.child_environ(),
        stderr=subprocess.PIPE,
        text=True,
    )


def _finished(command: subprocess.Popen[str]) -> None:
    _, said = command.communicate(timeout=LIMIT_S)
    if command.returncode != 0:
        raise RuntimeError(f"scontrol ended with {command.returncode}: {said.strip()}")


def measure(folder: Path, count: int) -> list[Suspend]:
    """Bring a cluster up, suspend its job ``count`` times, end both."""
    with DevCluster.up(ClusterSpec(nodes=1, profile="pause")) as cluster:
        run_dir = RunDir(folder)
        job_id = submit(cluster, run_dir)
        events = EventTail(run_dir.rank_events(0))
        events.until(EventKind.INSTALLED, limit_s=LIMIT_S)
        time.sleep(0.5)
        return [suspend_and_resume(cluster, job_id, events) for _ in range(count)]


def main() -> None:
    chosen = options("How long scontrol suspend takes to park a training job.")
    with scratch("suspend", chosen) as folder:
        seen = measure(folder, 2 if chosen.quick else 25)
    finish(
        chosen,
        "suspend latency: scontrol suspend -> parked",
        {
            "suspends": len(seen),
            **p50_p99("command_to_parked_ms", [one.to_parked_ms for one in seen]),
            "parked_before_sigstop": sum(one.parked_before_sigstop for one in seen) / len(seen),
        },
    )


if __name__ == "__main__":
    main()
