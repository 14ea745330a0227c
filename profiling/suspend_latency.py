"""From `scontrol suspend` to parked, on a real Slurm.

A training job runs on a dev cluster of its own. The clock starts just before the command is run,
so that starting scontrol, slurmctld, slurmd and the signal are all in it. Slurm sends SIGSTOP two
seconds after SIGTSTP: a rank that has said "parked" while it is not stopped yet has parked before
that.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from harness import PROFILING, EventTail, Slurm, finish, finished, options, p50_p99, scratch
from processes import is_stopped, wait_until

from hydroslurm.core.events import EventKind
from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import ClusterSpec, DevCluster

LIMIT_S = 60.0


def suspend_and_resume(slurm: Slurm, job_id: str, events: EventTail) -> tuple[float, bool]:
    """One round: milliseconds until it was parked, and whether that was before SIGSTOP; ends when
    the job trains again."""
    sent_ns = time.monotonic_ns()
    command = slurm.start("scontrol", "suspend", job_id)
    parked = events.until(EventKind.PARKED, limit_s=LIMIT_S)
    in_time = not is_stopped(parked.pid)
    finished(command)
    wait_until(lambda: is_stopped(parked.pid), "the job is stopped")
    command = slurm.start("scontrol", "resume", job_id)
    events.until(EventKind.FIRST_OPERATOR_RELEASED, limit_s=LIMIT_S)
    finished(command)
    return (parked.mono_ns - sent_ns) / 1e6, in_time


def measure(folder: Path, count: int) -> list[tuple[float, bool]]:
    """Bring a cluster up, suspend its job ``count`` times, end both."""
    with DevCluster.up(ClusterSpec(nodes=1, profile="pause")) as cluster:
        run_dir, slurm = RunDir(folder).create(), Slurm(cluster, folder)
        victim = f"{sys.executable} {PROFILING}/victim.py hydroslurm {folder} train 0"
        options = ("-p", "low", "-n1", "-o", str(run_dir.logs / "job.log"))
        job_id = slurm.submit(*options, "--wrap", f"exec srun --unbuffered {victim}")
        events = EventTail(run_dir.rank_events(0))
        events.until(EventKind.INSTALLED, limit_s=LIMIT_S)
        time.sleep(0.5)
        return [suspend_and_resume(slurm, job_id, events) for _ in range(count)]


def main() -> None:
    chosen = options("How long scontrol suspend takes to park a training job.")
    with scratch("suspend") as folder:
        to_parked_ms, in_time = zip(*measure(folder, 2 if chosen.quick else 25), strict=True)
    finish(
        chosen,
        "suspend latency: scontrol suspend -> parked",
        {
            "suspends": len(in_time),
            **p50_p99("command_to_parked_ms", to_parked_ms),
            "parked_before_sigstop": sum(in_time) / len(in_time),
        },
    )


if __name__ == "__main__":
    main()
