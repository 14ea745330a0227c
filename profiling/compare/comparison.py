"""All peers through one storm on one dev cluster, a few at a time."""

from __future__ import annotations

import json
import math
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import drive
import figures
import pairs
from attempts import Attempt, read_attempts
from harness import rounded
from interruptions import Event, Kind, storm
from peers import PEERS, Peer, absent
from slurm_jobs import BEGIN_DELAY_S, Place, cluster_spec

from hydroslurm.devcluster import DevCluster

STEPS_PER_EPOCH = 360
COUNTS: dict[Kind, int] = {"suspend": 14, "preempt": 4, "requeue": 2}
MEAN_GAP_S = 2.5
REMARKS = (
    "signal: the moment at which it reached the job step, by a witness inside of it",
    "parked: the end of the last operator; 0 when it did not come to the end of that in which the "
    "signal found it: frozen inside of it, or held at an operator that it is made of",
    "durable: what the next attempt loads has its name; the driver looks every 3 ms",
    "steps_lost: made by an attempt and not in what the next one began with",
    "samples_seen_twice, samples_never_seen: in the steps that count, summed over the epochs",
    "equal_bits: the weights at the end are those of an undisturbed run of the same script",
    "step_time_ratio of Lightning and transformers is that of their whole training loops",
)


@dataclass(frozen=True)
class Plan:
    """How much is done.

    Attributes:
        epochs: of each training.
        rounds, steps_per_turn: of the pairs that give the step times.
        limit_s: after its first step a peer is given up.
        side_by_side: so many train at a time.
        events: of the storm; by default made of the seed.
        paired: so many of the peers get a step time, from the last.
        width: of the network; a step of 96 takes 4 to 20 ms.
    """

    epochs: int
    rounds: int
    steps_per_turn: int
    limit_s: float
    side_by_side: int
    events: tuple[Event, ...] = ()
    paired: int = len(PEERS)
    width: int = 96

    @property
    def steps(self) -> int:
        return self.epochs * STEPS_PER_EPOCH

    def outlasting_storm(self, bare_step_s: float) -> Plan:
        """With as many epochs as the storm of a seed needs on this machine."""
        if self.events or math.isnan(bare_step_s):
            return self
        wanted = math.ceil(UNDISTURBED_S / (bare_step_s * STEPS_PER_EPOCH))
        return replace(self, epochs=max(self.epochs, wanted))


UNDISTURBED_S = 130.0
"""Of the training without a storm, at least: all events then strike one that loses nothing, too."""
FULL = Plan(epochs=12, rounds=16, steps_per_turn=30, limit_s=500.0, side_by_side=2)
QUICK = Plan(
    epochs=2,
    rounds=1,
    steps_per_turn=5,
    limit_s=120.0,
    side_by_side=3,
    events=(Event(0.2, "suspend", 2.2), Event(3.2, "requeue")),
    paired=1,
    width=24,
)


def compare(
    wanted: Sequence[Peer],
    plan: Plan,
    folder: Path,
    *,
    seed: int,
    keep: Path | None = None,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole result. A peer that fails is in it as such, and does not take the others along.

    Args:
        folder: of the runs.
        keep: a file for what there is so far, in case that this process does not come to its end.
        earlier: what such a file has. Peers that came to their end in it are not run again, and
            the step of the bare script is the one that was measured then.

    Raises:
        ValueError: ``earlier`` is of another storm.
    """
    present = [peer for peer in wanted if _is_here(peer)]
    events = plan.events or storm(seed=seed, counts=COUNTS, mean_gap_s=MEAN_GAP_S)
    if earlier is not None:
        plan = plan.outlasting_storm((earlier["bare_step_ms"] or math.nan) / 1e3)
    done = _done(earlier, events=events, steps=plan.steps)
    left = [peer for peer in present if peer.name not in done]
    load_before = os.getloadavg()[0]
    with DevCluster.up(cluster_spec(plan.side_by_side)) as cluster:
        places = _places(cluster, plan)
        costs = _each(left[-plan.paired :], places, _cost(folder, plan))
        bare_s = [step_s for pair in costs.values() if pair is not None for step_s in pair.bare_s]
        bare_step_s = statistics.median(bare_s) if bare_s else math.nan
        if earlier is not None and earlier["bare_step_ms"] is not None:
            bare_step_s = earlier["bare_step_ms"] / 1e3
            load_before = earlier["load_average_before"]
        plan = plan.outlasting_storm(bare_step_s)
        result = {
            "title": f"One training, one storm of {len(events)} preemptions (seed {seed}), "
            f"{len(present)} ways to meet it",
            "seed": seed,
            "events": [vars(event) for event in events],
            "steps": plan.steps,
            "bare_step_ms": 1e3 * bare_step_s,
            "goodput_limit": _limit(events, plan.steps * bare_step_s),
            "slurm_version": cluster.run(["sinfo", "--version"]).stdout.split()[-1],
            "remarks": list(REMARKS),
            "left_out": [peer.name for peer in wanted if peer not in present],
            "load_average_before": load_before,
            "peers": {peer.name: done[peer.name] for peer in present if peer.name in done},
        }
        one = _Storm(folder, plan, events, bare_step_s, costs, result, keep)
        _each(left, places, one)
    result["load_average_after"] = os.getloadavg()[0]
    return dict(rounded(result))


@dataclass
class _Storm:
    """Takes one peer through the storm, and puts its figures into the result."""

    folder: Path
    plan: Plan
    events: Sequence[Event]
    bare_step_s: float
    costs: Mapping[str, pairs.Pair | None]
    result: dict[str, Any]
    keep: Path | None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, peer: Peer, place: Place) -> None:
        pair = self.costs.get(peer.name)
        found = {
            "name": peer.name,
            "title": peer.title,
            "version": peer.version(),
            "remark": peer.remark,
            "step_time_ratio": None if pair is None else pair.ratio,
        }
        try:
            found |= self._figures(peer, place)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            found |= {"finished": False, "failure": str(error), "by_hand": []}
        if not found["finished"]:
            say(f"{peer.title} did not come to its end: {found['failure']}")
        with self._lock:
            peers = {**self.result["peers"], peer.name: found}
            self.result["peers"] = {name: peers[name] for name in PEERS if name in peers}
            if self.keep is not None:
                self.keep.parent.mkdir(parents=True, exist_ok=True)
                self.keep.write_text(json.dumps(rounded(self.result), indent=2) + "\n")

    def _figures(self, peer: Peer, place: Place) -> dict[str, Any]:
        where = self.folder / peer.name
        course = drive.through(
            peer,
            place,
            where,
            events=self.events,
            epochs=self.plan.epochs,
            limit_s=self.plan.limit_s,
        )
        attempts = read_attempts(where)
        found = figures.of_course(
            course,
            attempts,
            steps_per_epoch=STEPS_PER_EPOCH,
            steps=self.plan.steps,
            bare_step_s=self.bare_step_s,
        )
        return found | self._exactness(peer, place, where, attempts)

    def _exactness(
        self, peer: Peer, place: Place, where: Path, attempts: Sequence[Attempt]
    ) -> dict[str, Any]:
        """Against the same training, undisturbed."""
        alone = where.with_name(f"{where.name}-undisturbed")
        limit_s = self.plan.limit_s
        course = drive.through(
            peer, place, alone, events=(), epochs=self.plan.epochs, limit_s=limit_s
        )
        if course.failure:
            raise RuntimeError(f"undisturbed: {course.failure}")
        samples = figures.of_samples(
            attempts, read_attempts(alone), steps_per_epoch=STEPS_PER_EPOCH
        )
        same = None if (ends := _weights(where)) is None else ends == _weights(alone)
        return {**samples, "equal_bits": same}


def _done(
    earlier: Mapping[str, Any] | None, *, events: Sequence[Event], steps: int
) -> dict[str, Any]:
    """Name -> figures of the peers that came to their end in the same storm."""
    if earlier is None:
        return {}
    here = rounded({"events": [vars(event) for event in events], "steps": steps})
    if {name: earlier[name] for name in here} != here:
        raise ValueError(
            f"wanted a result of {len(events)} events in {steps} steps to go on with, and it has "
            f"{len(earlier['events'])} in {earlier['steps']}, or at other moments: give the same "
            "--seed, and --quick or not, as then"
        )
    return {name: peer for name, peer in earlier["peers"].items() if peer["finished"]}


def say(words: str) -> None:
    """To people who wait: not a part of the result."""
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def _places(cluster: DevCluster, plan: Plan) -> queue.Queue[Place]:
    cores = sorted(os.sched_getaffinity(0))
    places: queue.Queue[Place] = queue.Queue()
    for number in range(plan.side_by_side):
        core = cores[number % len(cores)]
        places.put(Place(cluster, f"n{number + 1}", core, plan.width))
    return places


def _each(
    peers: Sequence[Peer], places: queue.Queue[Place], do: Callable[[Peer, Place], Any]
) -> dict[str, Any]:
    """Name -> what became of it; None for one that failed, which is said. Each has its place."""

    def at_a_place(peer: Peer) -> Any:
        place = places.get()
        try:
            say(f"{peer.title} ...")
            return do(peer, place)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            say(f"{peer.title} failed: {error}")
            return None
        finally:
            places.put(place)

    with ThreadPoolExecutor(places.qsize()) as pool:
        return dict(zip([p.name for p in peers], pool.map(at_a_place, peers), strict=True))


def _cost(folder: Path, plan: Plan) -> Callable[[Peer, Place], pairs.Pair]:
    def cost(peer: Peer, place: Place) -> pairs.Pair:
        where = folder / f"pair-{peer.name}"
        return pairs.measure(peer, place, where, rounds=plan.rounds, steps=plan.steps_per_turn)

    return cost


def _limit(events: Sequence[Event], bare_s: float) -> float:
    """The goodput of somebody who loses nothing but what Slurm takes."""
    held_s = sum(event.hold_s for event in events)
    queued_s = BEGIN_DELAY_S * sum(event.kind != "suspend" for event in events)
    return bare_s / (bare_s + held_s + queued_s)


def _weights(folder: Path) -> str | None:
    """The hash that a training has left at its end."""
    mark = folder / "done.json"
    return str(json.loads(mark.read_text())["weights_sha256"]) if mark.exists() else None


def _is_here(peer: Peer) -> bool:
    missing = absent(peer)
    if missing:
        say(f"{peer.title} is left out: no {', '.join(missing)}; run make setup")
    return not missing
