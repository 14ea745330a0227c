"""KillWait = 5 s and a state of 500 MB: is it committed before SIGKILL, every time?

One training on a dev cluster is stopped by gang scheduling for an urgent job, and by `scontrol
requeue`, by turns: both come without a grace, so that KillWait is all there is. Counted as
committed is a stop whose very step is committed, and from which the next attempt went on.

`deadline_left_ms_min` is what was left of KillWait in the worst case. Slurm 22.05 adds about 2 s to
it, which nobody counts on. `disk_mb_per_s` is a plain write + fsync of as many bytes on the same
disk, made between the attempts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import finish, percentile, scratch
from requeues import RequeuedTraining, Stop, Way, disk_mb_per_s
from stop import cluster_facts, options_of_stops, stop_somewhere, there

from hydroslurm.devcluster import ClusterSpec, DevCluster

TURNS: tuple[Way, ...] = ("urgent", "requeue")


def measure(
    folder: Path, *, count: int, state_bytes: int, kill_wait_s: int
) -> tuple[list[Stop], list[float], dict[str, Any]]:
    """The stops, the speed of the disk (MB/s), and what the cluster was."""
    disk: list[float] = []

    def try_the_disk() -> None:
        disk.append(disk_mb_per_s(folder, state_bytes))

    spec = ClusterSpec(nodes=1, profile="gang-requeue", kill_wait_s=kill_wait_s)
    with DevCluster.up(spec) as cluster:
        training = RequeuedTraining(cluster, folder / "job", state_bytes=state_bytes)
        stops = [
            stop_somewhere(
                training,
                TURNS[number % len(TURNS)],
                meanwhile=try_the_disk if number % 4 == 0 else None,
            )
            for number in range(count)
        ]
        training.cancel()
        return stops, disk, cluster_facts(cluster)


def figures(stops: Sequence[Stop], disk: Sequence[float], kill_wait_s: int) -> dict[str, Any]:
    durable_ms = there(stops, "to_durable_ms")
    return {
        "preemptions": len(stops),
        "committed": sum(stop.to_durable_ms is not None and stop.steps_lost == 0 for stop in stops),
        "steps_lost": sum(stop.steps_lost for stop in stops),
        "state_bytes": max((stop.state_bytes or 0 for stop in stops), default=0),
        "sigterm_to_durable_ms_p50": percentile(durable_ms, 50),
        "sigterm_to_durable_ms_max": max(durable_ms, default=None),
        "deadline_left_ms_min": kill_wait_s * 1e3 - max(durable_ms) if durable_ms else None,
        "safe_point_to_save_started_ms_p50": percentile(there(stops, "asking_ms"), 50),
        "staging_ms_p50": percentile(there(stops, "staging_ms"), 50),
        "disk_mb_per_s": statistics.median(disk),
        "disk_mb_per_s_min": min(disk),
    }


def main() -> None:
    chosen = options_of_stops(
        "A large state, and nothing but KillWait.", count=20, state_bytes=500e6, kill_wait_s=5
    ).parse_args()
    with scratch("killwait", chosen) as folder:
        stops, disk, facts = measure(
            folder,
            count=2 if chosen.quick else chosen.count,
            state_bytes=int(20e6 if chosen.quick else chosen.bytes),
            kill_wait_s=chosen.kill_wait_s,
        )
    title = "killwait: a large state, and nothing but KillWait"
    finish(chosen, title, {**figures(stops, disk, chosen.kill_wait_s), **facts})


if __name__ == "__main__":
    main()
