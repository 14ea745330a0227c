"""Several ranks: do all stop behind one step, how soon are all parked, and what does it cost while
nothing happens?

Ranks of this machine train with DistributedDataParallel, gloo, in a Run (rank_crew.py). One of
them, chosen by chance, gets the signal: SIGUSR1 and SIGUSR2 for a pause, SIGTERM for a stop. Clocks
start in its handler; all stamps are CLOCK_MONOTONIC, which the ranks share.

`stop_skew_steps` is the largest difference, over all stops, between the steps behind which the
ranks of one stop saved. `signal_to_all_durable_ms` ends when the last rank knows that the joint
checkpoint of some 37 MB is committed. `per_step_cost_ratio` is DDP in a Run / bare DDP,
`per_step_cost_ratio_flag` bare DDP with a flag that all ranks sum in each step / bare DDP, and
`ratio_bare_again` bare / bare: medians over rounds of interleaved blocks in one process group
(rank_cost.py). With more ranks than cores they wait for each other's turns.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import statistics
import time
from dataclasses import dataclass
from typing import Any

from harness import finish, median_ratio, options, p50_p99, scratch
from rank_attempts import Attempt, Crew, crew_in

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.exitcodes import RUN_AGAIN

WORLDS = (2, 4)
SEED = 4
COST_RANKS = 2
STATE_BYTES = 36_000_000


@dataclass(frozen=True)
class Pause:
    """One pause of all ranks and its end."""

    to_first_parked_ms: float
    to_all_parked_ms: float
    to_all_released_ms: float
    rounds: int
    in_flight: int


@dataclass(frozen=True)
class Stop:
    """One stop of all ranks; ``to_all_durable_ms`` is None when it was not committed on all."""

    skew_steps: int
    to_all_know_ms: float
    to_all_at_safe_point_ms: float
    to_all_durable_ms: float | None
    state_bytes: int


def measure_pauses(crew: Crew, world: int, count: int) -> list[Pause]:
    """Pause and resume one attempt of so many ranks ``count`` times."""
    chance = random.Random(SEED + world)
    attempt = crew.begin("train", world, state_bytes=0)
    attempt.wait_until_all_train()
    time.sleep(0.5)
    seen = [_pause(attempt, chance) for _ in range(count)]
    attempt.signal(0, signal.SIGTERM)
    _require_saved(crew.wait_for_end(attempt))
    shutil.rmtree(attempt.folder)
    return seen


def _pause(attempt: Attempt, chance: random.Random) -> Pause:
    time.sleep(chance.uniform(0.02, 0.1))
    rank = chance.randrange(len(attempt.pids))
    attempt.signal(rank, signal.SIGUSR1)
    sent = attempt.wait_for(rank, EventKind.SIGNAL_RECEIVED)
    first = attempt.wait_for(rank, EventKind.PARKED)
    parked = attempt.wait_for_all(EventKind.ALL_PARKED)
    attempt.signal(rank, signal.SIGUSR2)
    resumed = attempt.wait_for(rank, EventKind.SIGNAL_RECEIVED)
    released = attempt.wait_for_all(EventKind.FIRST_OPERATOR_RELEASED)
    return Pause(
        to_first_parked_ms=_ms(sent, [first]),
        to_all_parked_ms=_ms(sent, parked),
        to_all_released_ms=_ms(resumed, released),
        rounds=max(int(event.data["rounds"]) for event in parked),
        in_flight=max(int(event.data["in_flight"]) for event in parked),
    )


def measure_stops(crew: Crew, world: int, count: int) -> list[Stop]:
    """Stop so many attempts of so many ranks."""
    chance = random.Random(SEED + world)
    return [_stop(crew, world, chance) for _ in range(count)]


def _stop(crew: Crew, world: int, chance: random.Random) -> Stop:
    attempt = crew.begin("train", world, state_bytes=STATE_BYTES)
    attempt.wait_until_all_train()
    time.sleep(chance.uniform(0.2, 0.5))
    rank = chance.randrange(world)
    attempt.signal(rank, signal.SIGTERM)
    _require_saved(crew.wait_for_end(attempt))
    sent = attempt.events(EventKind.STOP_REQUESTED)[rank][0]
    if sent.data["signal"] != "SIGTERM":
        raise RuntimeError(f"the stop of rank {rank} came from {sent.data}, wanted its SIGTERM")
    at_safe_point = [events[0] for events in attempt.events(EventKind.SAFE_POINT)]
    known = [_with(events, "safe_point_index") for events in attempt.events(EventKind.STOP_AGREED)]
    durable = [next(iter(events), None) for events in attempt.events(EventKind.SAVE_COMMITTED)]
    stop_steps = [int(event.step or 0) for event in at_safe_point]
    all_durable = [event for event in durable if event is not None]
    seen = Stop(
        skew_steps=max(stop_steps) - min(stop_steps),
        to_all_know_ms=_ms(sent, known),
        to_all_at_safe_point_ms=_ms(sent, at_safe_point),
        to_all_durable_ms=_ms(sent, all_durable) if len(all_durable) == world else None,
        state_bytes=max((int(event.data["state_bytes"]) for event in all_durable), default=0),
    )
    shutil.rmtree(attempt.folder)
    return seen


def measure_cost(crew: Crew, *, rounds: int, steps_per_block: int) -> dict[str, list[float]]:
    """Arm -> seconds per step in each round."""
    attempt = crew.begin("cost", COST_RANKS, rounds=rounds, steps=steps_per_block)
    statuses = crew.wait_for_end(attempt)
    if statuses != {0}:
        raise RuntimeError(f"a rank ended with one of {statuses} while steps were timed, wanted 0")
    seen: dict[str, list[float]] = json.loads((attempt.folder / "cost.json").read_text())
    shutil.rmtree(attempt.folder)
    return seen


def _ms(begin: Event, ends: list[Event]) -> float:
    """To the last of them."""
    return (max(end.mono_ns for end in ends) - begin.mono_ns) / 1e6


def _with(events: list[Event], key: str) -> Event:
    return next(event for event in events if key in event.data)


def _require_saved(statuses: set[int]) -> None:
    if statuses != {RUN_AGAIN}:
        raise RuntimeError(f"ranks that were stopped ended with {statuses}, wanted {RUN_AGAIN}")


def figures_of_pauses(world: int, pauses: list[Pause]) -> dict[str, float]:
    return {
        f"pauses_{world}": len(pauses),
        **p50_p99(f"signal_to_all_parked_ms_{world}", [p.to_all_parked_ms for p in pauses]),
        f"signal_to_first_parked_ms_{world}_p50": statistics.median(
            p.to_first_parked_ms for p in pauses
        ),
        **p50_p99(f"resume_to_all_released_ms_{world}", [p.to_all_released_ms for p in pauses]),
        f"parking_rounds_{world}_p50": statistics.median(p.rounds for p in pauses),
    }


def figures_of_stops(world: int, stops: list[Stop]) -> dict[str, float]:
    durable_ms = [s.to_all_durable_ms for s in stops if s.to_all_durable_ms is not None]
    return {
        f"stops_{world}": len(stops),
        f"committed_{world}": len(durable_ms),
        **p50_p99(f"common_step_known_ms_{world}", [s.to_all_know_ms for s in stops]),
        f"signal_to_all_at_safe_point_ms_{world}_p50": statistics.median(
            s.to_all_at_safe_point_ms for s in stops
        ),
        **p50_p99(f"signal_to_all_durable_ms_{world}", durable_ms),
    }


def main() -> None:
    chosen = options("Several ranks: stopping together, parking together, and what it costs.")
    pauses: dict[int, list[Pause]] = {}
    stops: dict[int, list[Stop]] = {}
    with scratch("ranks", chosen) as folder, crew_in(folder) as crew:
        for world in WORLDS:
            pauses[world] = measure_pauses(crew, world, 3 if chosen.quick else 60)
            stops[world] = measure_stops(crew, world, 1 if chosen.quick else 20)
        cost = measure_cost(
            crew,
            rounds=2 if chosen.quick else 80,
            steps_per_block=5 if chosen.quick else 24,
        )
    every_stop = [stop for of_world in stops.values() for stop in of_world]
    result: dict[str, Any] = {
        "stop_skew_steps": max(stop.skew_steps for stop in every_stop),
        "in_flight_when_parked": max(p.in_flight for of_world in pauses.values() for p in of_world),
        "state_bytes": max(stop.state_bytes for stop in every_stop),
    }
    for world in WORLDS:
        result |= figures_of_pauses(world, pauses[world]) | figures_of_stops(world, stops[world])
    finish(
        chosen,
        "ranks: all stop behind one step, all park at one collective, and what it costs",
        {
            **result,
            "per_step_cost_ratio": median_ratio(cost, "run", "bare"),
            "per_step_cost_ratio_flag": median_ratio(cost, "flag", "bare"),
            "ratio_bare_again": median_ratio(cost, "again", "bare"),
            "cost_rounds": len(cost["bare"]),
            "step_ms": 1e3 * statistics.median(cost["bare"]),
        },
    )


if __name__ == "__main__":
    main()
