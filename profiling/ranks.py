"""Several ranks: do all stop after one step, how soon are all parked, and what does it cost while
nothing happens?

Ranks of this machine train with DistributedDataParallel, gloo, in a Run (rank_crew.py). One of
them, chosen by chance, gets the signal: SIGUSR1 and SIGUSR2 for a pause, SIGTERM for a stop. Clocks
start in its handler; all stamps are CLOCK_MONOTONIC, which the ranks share.

`stop_skew_steps` is the largest difference, over all stops, between the steps after which the
ranks of one stop saved. `signal_to_all_durable_ms` ends when the last rank knows that the joint
checkpoint of some 37 MB is committed. `per_step_cost_ratio` is DDP in a Run / bare DDP,
`per_step_cost_ratio_flag` bare DDP with a flag that all ranks sum in each step / bare DDP, and
`ratio_bare_again` bare / bare: medians over rounds of interleaved blocks in one process group. With
more ranks than cores they wait for each other's turns.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import PROFILING, TESTS, EventTail, finish, median_ratio, options, p50_p99, scratch

# isort: split
import forkedranks
from processes import Child, child

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.rundir import RunDir

WORLDS = (2, 4)
SEED = 4
COST_RANKS = 2
STATE_BYTES = 36_000_000
LIMIT_S = 120.0


class Attempt:
    """Ranks of rank_crew.py, as seen from outside, in a folder of their own."""

    def __init__(self, crew: Child, folder: Path, what: str, world: int, **more: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self._crew = crew
        pids = forkedranks.start(
            crew,
            world,
            what=what,
            folder=str(self.folder),
            meet=str(self.folder / "meet"),
            environ={"HYDROSLURM_STEP_KEY": secrets.token_hex(32)},
            **more,
        )
        self._pids = list(pids.values())
        self._run = RunDir(self.folder / "run")
        self._tails = [EventTail(self._run.rank_events(rank)) for rank in range(world)]

    def end(self, *, status: int) -> None:
        """Wait until all ranks have ended."""
        found = set(forkedranks.wait_for_end(self._crew, len(self._pids)).values())
        if found != {status}:
            raise RuntimeError(f"ranks ended with {found}, wanted {status}")

    def wait_for_all(self, kind: EventKind) -> list[Event]:
        """The next event of this kind of each rank."""
        return [tail.until(kind, limit_s=LIMIT_S) for tail in self._tails]

    def signal(self, rank: int, signo: int) -> None:
        """Send it, and stay out of the way: on few cores the reader of events may sit on the very
        one that a rank needs."""
        os.kill(self._pids[rank], signo)
        time.sleep(0.1)

    def of_rank(self, rank: int, kind: EventKind) -> Event:
        """Its next event of this kind."""
        return self._tails[rank].until(kind, limit_s=LIMIT_S)

    def events(self, kind: EventKind) -> list[list[Event]]:
        """Of each rank, all of this kind."""
        return [
            [event for event in read_events(self._run.rank_events(rank)) if event.kind is kind]
            for rank in range(len(self._pids))
        ]


def measure_pauses(crew: Child, folder: Path, world: int, count: int) -> dict[str, float]:
    """Pause and resume one attempt of so many ranks ``count`` times."""
    chance = random.Random(SEED + world)
    attempt = Attempt(crew, folder, "train", world, state_bytes=0)
    attempt.wait_for_all(EventKind.FIRST_STEP)
    time.sleep(0.5)
    parked_ms, in_flight = [], 0
    for _ in range(count):
        time.sleep(chance.uniform(0.02, 0.1))
        rank = chance.randrange(world)
        attempt.signal(rank, signal.SIGUSR1)
        sent = attempt.of_rank(rank, EventKind.SIGNAL_RECEIVED)
        parked = attempt.wait_for_all(EventKind.ALL_PARKED)
        attempt.signal(rank, signal.SIGUSR2)
        attempt.wait_for_all(EventKind.FIRST_OPERATOR_RELEASED)
        parked_ms.append(_ms(sent, parked))
        in_flight = max(in_flight, *(int(event.data["in_flight"]) for event in parked))
    attempt.signal(0, signal.SIGTERM)
    attempt.end(status=RUN_AGAIN)
    return {
        **p50_p99(f"signal_to_all_parked_ms_{world}", parked_ms),
        f"in_flight_when_parked_{world}": in_flight,
    }


def measure_stops(crew: Child, folder: Path, world: int, count: int) -> dict[str, float]:
    """Stop so many attempts of so many ranks."""
    chance = random.Random(SEED + world)
    durable_ms, skew_steps = [], 0
    for _ in range(count):
        attempt = Attempt(crew, folder, "train", world, state_bytes=STATE_BYTES)
        attempt.wait_for_all(EventKind.FIRST_STEP)
        time.sleep(chance.uniform(0.2, 0.5))
        rank = chance.randrange(world)
        attempt.signal(rank, signal.SIGTERM)
        attempt.end(status=RUN_AGAIN)
        sent = attempt.events(EventKind.STOP_REQUESTED)[rank][0]
        steps = [int(of_rank[0].step or 0) for of_rank in attempt.events(EventKind.SAFE_POINT)]
        skew_steps = max(skew_steps, max(steps) - min(steps))
        saved = attempt.events(EventKind.SAVE_COMMITTED)
        if all(saved):
            durable_ms.append(_ms(sent, [of_rank[0] for of_rank in saved]))
        shutil.rmtree(attempt.folder)
    return {
        f"stops_{world}": count,
        f"committed_{world}": len(durable_ms),
        f"stop_skew_steps_{world}": skew_steps,
        **p50_p99(f"signal_to_all_durable_ms_{world}", durable_ms),
    }


def measure_cost(crew: Child, folder: Path, *, rounds: int, steps: int) -> dict[str, float]:
    attempt = Attempt(crew, folder, "cost", COST_RANKS, rounds=rounds, steps=steps)
    attempt.end(status=0)
    seen: dict[str, list[float]] = json.loads((attempt.folder / "cost.json").read_text())
    return {
        "per_step_cost_ratio": median_ratio(seen, "run", "bare"),
        "per_step_cost_ratio_flag": median_ratio(seen, "flag", "bare"),
        "ratio_bare_again": median_ratio(seen, "again", "bare"),
        "cost_rounds": len(seen["bare"]),
    }


def _ms(begin: Event, ends: list[Event]) -> float:
    """To the last of them."""
    return (max(end.mono_ns for end in ends) - begin.mono_ns) / 1e6


def main() -> None:
    chosen = options("Several ranks: stopping together, parking together, and what it costs.")
    result: dict[str, float] = {}
    paths = os.pathsep.join([str(PROFILING), str(TESTS)])
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    program = (PROFILING / "rank_crew.py").read_text()
    with scratch("ranks") as folder, child(program, folder, environ=environ) as crew:
        crew.expect("ready")
        for world in WORLDS:
            result |= measure_pauses(crew, folder, world, 3 if chosen.quick else 60)
            result |= measure_stops(crew, folder, world, 1 if chosen.quick else 20)
        rounds, steps = (2, 5) if chosen.quick else (80, 24)
        result |= measure_cost(crew, folder, rounds=rounds, steps=steps)
    result["stop_skew_steps"] = max(result[f"stop_skew_steps_{world}"] for world in WORLDS)
    title = "ranks: all stop after one step, all park at one collective, and what it costs"
    finish(chosen, title, result)


if __name__ == "__main__":
    main()
