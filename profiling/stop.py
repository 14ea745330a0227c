"""Real requeues: what a stop takes from SIGTERM to the commit, to the queue, and to the next step.

A training on dev clusters of its own is stopped in three ways, each several times:

    grace     an urgent job, where Slurm gives a grace (PreemptMode=REQUEUE, GraceTime): the rank
              itself asks for the requeue
    gang      an urgent job under gang scheduling, where Slurm requeues at once and kills after
              KillWait
    requeue   `scontrol requeue` by an operator, also killed after KillWait

The clock of a stop starts in the handler of SIGTERM. `requeued_to_eligible_s` is Slurm's own wait
(AuthInfo=cred_expire: 121 s by default); `eligible_to_first_step_ms` has the scheduler, the start
of Python and torch, the load of the checkpoint, and one step in it.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import finish, p50_p99, parser, scratch
from requeues import RequeuedTraining, Stop, Way

from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.devcluster.spec import Profile

WAYS: dict[str, tuple[Profile, Way]] = {
    "grace": ("requeue", "urgent"),
    "requeue": ("requeue", "requeue"),
    "gang": ("gang-requeue", "urgent"),
}
SEED = 1


def measure(
    folder: Path, ways: Sequence[str], *, count: int, state_bytes: int, kill_wait_s: int
) -> tuple[dict[str, list[Stop]], dict[str, Any]]:
    """Way -> its stops, and what the clusters were; one cluster at a time, one stop at a time."""
    seen: dict[str, list[Stop]] = {}
    facts: dict[str, Any] = {}
    for profile in dict.fromkeys(WAYS[way][0] for way in ways):
        spec = ClusterSpec(nodes=1, profile=profile, kill_wait_s=kill_wait_s)
        with DevCluster.up(spec) as cluster:
            facts |= cluster_facts(cluster)
            training = RequeuedTraining(cluster, folder / profile, state_bytes=state_bytes)
            for way in [way for way in ways if WAYS[way][0] == profile]:
                seen[way] = [stop_somewhere(training, WAYS[way][1]) for _ in range(count)]
            training.cancel()
    return seen, facts


def stop_somewhere(
    training: RequeuedTraining, way: Way, *, meanwhile: Callable[[], object] | None = None
) -> Stop:
    """Train on for a moment, so that the stop comes anywhere within a step, and stop."""
    chance = random.Random(f"{SEED}-{training.attempt}")
    time.sleep(chance.uniform(0.2, 0.7))
    return training.stop(way, meanwhile=meanwhile)


def cluster_facts(cluster: DevCluster) -> dict[str, Any]:
    """What of the site these figures depend on, as Slurm itself says it."""
    shown = cluster.run(["scontrol", "show", "config"]).stdout
    config = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", shown, re.MULTILINE))
    expire = re.search(r"cred_expire=(\d+)", config["AuthInfo"])
    return {
        "slurm_version": config["SLURM_VERSION"],
        "kill_wait_s": int(config["KillWait"].split()[0]),
        "grace_time_s": cluster.spec.grace_s,
        "cred_expire_s": int(expire[1]) if expire else 120,
    }


def figures(seen: dict[str, list[Stop]]) -> dict[str, Any]:
    """Over all stops, and the medians of each way."""
    stops = [stop for of_way in seen.values() for stop in of_way]
    result: dict[str, Any] = {
        "stops": len(stops),
        "committed": sum(stop.to_durable_ms is not None for stop in stops),
        "steps_lost": sum(stop.steps_lost for stop in stops),
        **p50_p99("sigterm_to_safe_point_ms", there(stops, "to_safe_point_ms")),
        **p50_p99("safe_point_to_save_started_ms", there(stops, "asking_ms")),
        **p50_p99("sigterm_to_durable_ms", there(stops, "to_durable_ms")),
        **p50_p99("durable_to_requeued_ms", there(stops, "durable_to_requeued_ms")),
        **p50_p99("requeued_to_eligible_s", there(stops, "requeued_to_eligible_s")),
        **p50_p99("eligible_to_first_step_ms", there(stops, "eligible_to_first_step_ms")),
        "state_bytes": max((stop.state_bytes or 0 for stop in stops), default=0),
    }
    for way, of_way in seen.items():
        result[f"stops_{way}"] = len(of_way)
        for name in ("to_durable_ms", "durable_to_requeued_ms", "eligible_to_first_step_ms"):
            key = f"sigterm_{name}" if name == "to_durable_ms" else name
            result[f"{key}_{way}_p50"] = median(there(of_way, name))
    return result


def there(stops: Sequence[Stop], name: str) -> list[float]:
    """One figure of all stops that have it; a stop that was killed lacks some."""
    return [value for stop in stops if (value := getattr(stop, name)) is not None]


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def options_of_stops(
    description: str, *, count: int, state_bytes: float, kill_wait_s: int
) -> ArgumentParser:
    """What stop.py and killwait.py take."""
    wanted = parser(description, directory=True)
    wanted.add_argument("--count", type=int, default=count, help="stops (%(default)s)")
    wanted.add_argument(
        "--bytes", type=float, default=state_bytes, help="about so large a state (%(default)s)"
    )
    wanted.add_argument("--kill-wait-s", type=int, default=kill_wait_s, help="KillWait")
    return wanted


def main() -> None:
    wanted = options_of_stops(
        "What a stop and a requeue take on a real Slurm; --count is of each way.",
        count=4,
        state_bytes=50e6,
        kill_wait_s=30,
    )
    wanted.add_argument("--way", choices=WAYS, action="append", help="may be given again; all")
    chosen = wanted.parse_args()
    with scratch("stop", chosen) as folder:
        seen, facts = measure(
            folder,
            chosen.way or list(WAYS),
            count=1 if chosen.quick else chosen.count,
            state_bytes=int(5e6 if chosen.quick else chosen.bytes),
            kill_wait_s=chosen.kill_wait_s,
        )
    title = "stop: SIGTERM -> durable -> requeued -> eligible -> first step"
    finish(chosen, title, {**figures(seen), **facts})


if __name__ == "__main__":
    main()
