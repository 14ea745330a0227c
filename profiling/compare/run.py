"""The same training, the same storm of preemptions, eight ways to meet it: one run, one JSON line,
one table.

    run.py                       everything, about half an hour
    run.py --finish              minutes until done, with failures of nodes: eight minutes
    run.py --quick               one suspend and one requeue each: to see that it runs
    run.py --peers hydroslurm,bare

The storm has suspends, preemptions by an urgent job (PreemptMode=REQUEUE without grace, with
preempt_send_user_signal) and an operator's requeues, at moments that are the seed's. Two peers
train at a time, each on one core and one node of its own. All save once per epoch, each in its own
way. With ``--finish`` a step waits for 20 ms, as for a device: a restart then takes as long as an
epoch, and what a framework costs per step is small.

    goodput                   the time that bare takes for these steps, undisturbed, over the time
                              from the submission to the last step: a step counts once, however
                              often it is trained
    minutes                   that time
    away_s                    of it without an attempt that trains: from the last step before to the
                              first step after each stop, and from the submission to the first
    paused_s                  of it without an operator
    signal                    the moment at which it reached the job step, by a witness inside of it
    parked                    the end of the last operator; 0 when it did not come to the end of
                              that in which the signal found it: frozen inside of it, or held at an
                              operator that it is made of
    durable                   what the next attempt loads has its name; the driver looks every 3 ms
    steps_lost                made by an attempt and not in what the next one began with
    samples_seen_twice        in the steps that count, summed over the epochs; so samples_never_seen
    equal_bits                the weights at the end are those of an undisturbed run of the script

A peer whose packages are missing is left out, with a word.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import queue
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import drive
import figures
from attempts import read_attempts
from drive import Event, Kind, storm
from harness import environment, finish, parser, rounded, scratch
from peers import PEERS, Peer
from slurm_jobs import BEGIN_DELAY_S, Place, cluster_spec
from table import BLOCKS, table

from hydroslurm.devcluster import DevCluster

STEPS_PER_EPOCH = 360
SEED = 6
COUNTS: dict[Kind, int] = {"suspend": 14, "preempt": 4, "requeue": 2}
FINISH_COUNTS: dict[Kind, int] = {"suspend": 2, "preempt": 1, "requeue": 1, "failure": 2}
FINISH_PEERS = (
    *("hydroslurm", "submitit", "lightning", "lightning+hydroslurm", "transformers", "torchft"),
    "bare",
)
MEAN_GAP_S = 2.5
UNDISTURBED_S = 130.0


@dataclass(frozen=True)
class Plan:
    """How much is done.

    Attributes:
        epochs: of each training.
        limit_s: after its first step a peer is given up.
        side_by_side: so many train at a time.
        width: of the network; a step of 96 takes 4 to 20 ms.
        think_s: for how long a step waits, as for a device.
        undisturbed_s: of the training without a storm, at least: all events then strike one that
            loses nothing, too. 0: as many epochs as there are.
        sees_bits: each peer also trains undisturbed, to compare samples and weights.
    """

    events: tuple[Event, ...]
    epochs: int
    limit_s: float
    side_by_side: int
    width: int
    think_s: float = 0.0
    undisturbed_s: float = UNDISTURBED_S
    sees_bits: bool = True

    @property
    def steps(self) -> int:
        return self.epochs * STEPS_PER_EPOCH


def plan_of(*, quick: bool, finish: bool) -> Plan:
    if quick:
        events = (Event(0.2, "suspend", 2.2), Event(3.2, "failure" if finish else "requeue"))
        return Plan(
            events, 2, 120.0, side_by_side=3, width=24, undisturbed_s=0, sees_bits=not finish
        )
    if finish:
        events = storm(seed=SEED, counts=FINISH_COUNTS, mean_gap_s=MEAN_GAP_S)
        return Plan(events, 1, 240.0, 2, 24, think_s=0.02, undisturbed_s=50.0, sees_bits=False)
    events = storm(seed=SEED, counts=COUNTS, mean_gap_s=MEAN_GAP_S)
    return Plan(events, epochs=12, limit_s=500.0, side_by_side=2, width=96)


def compare(wanted: Sequence[Peer], plan: Plan, folder: Path) -> dict[str, Any]:
    """The whole result. A peer that fails is in it as such, and does not take the others along."""
    present = [peer for peer in wanted if _is_here(peer)]
    with DevCluster.up(cluster_spec(plan.side_by_side)) as cluster:
        places = _places(cluster, plan)
        place = places.get()
        bare_step_s = _bare_step_s(place, folder / "alone", plan)
        places.put(place)
        needed = math.ceil(plan.undisturbed_s / (bare_step_s * STEPS_PER_EPOCH))
        plan = replace(plan, epochs=max(plan.epochs, needed))

        def take(peer: Peer) -> dict[str, Any]:
            taken = [places.get() for _ in range(peer.nodes)]
            try:
                say(f"{peer.title} ...")
                place = replace(taken[0], spare=taken[-1].node)
                return _through_storm(peer, place, folder, plan, bare_step_s)
            finally:
                for place in taken:
                    places.put(place)

        with ThreadPoolExecutor(plan.side_by_side) as pool:
            found = dict(zip([p.name for p in present], pool.map(take, present), strict=True))
        result = {
            "title": f"One training, one storm of {len(plan.events)} preemptions (seed {SEED}), "
            f"{len(present)} ways to meet it",
            "seed": SEED,
            "events": [vars(event) for event in plan.events],
            "steps": plan.steps,
            "bare_step_ms": 1e3 * bare_step_s,
            "goodput_limit": _limit(plan.events, plan.steps * bare_step_s),
            "slurm_version": cluster.run(["sinfo", "--version"]).stdout.split()[-1],
            "peers": found,
            **{f"minutes_{name}": peer.get("minutes") for name, peer in found.items()},
        }
    return dict(rounded(result))


def _is_here(peer: Peer) -> bool:
    try:
        peer.version()
    except importlib.metadata.PackageNotFoundError as missing:
        say(f"{peer.title} is left out: not installed: {missing.name}")
        return False
    return True


def _places(cluster: DevCluster, plan: Plan) -> queue.Queue[Place]:
    cores = sorted(os.sched_getaffinity(0))
    places: queue.Queue[Place] = queue.Queue()
    for number in range(plan.side_by_side):
        core = cores[number % len(cores)]
        places.put(Place(cluster, f"n{number + 1}", core, plan.width, plan.think_s))
    return places


def _bare_step_s(place: Place, folder: Path, plan: Plan) -> float:
    """A step of the bare script, undisturbed."""
    epochs = min(plan.epochs, 4)
    course = drive.through(
        PEERS["bare"], place, folder, events=(), epochs=epochs, limit_s=plan.limit_s
    )
    if course.failure:
        raise RuntimeError(f"bare, undisturbed: {course.failure}")
    (attempt,) = read_attempts(folder / "attempts")
    return (attempt.step_ns - attempt.first_step_ns) / 1e9 / (attempt.step - 1)


def _through_storm(
    peer: Peer, place: Place, folder: Path, plan: Plan, bare_step_s: float
) -> dict[str, Any]:
    """The figures of one peer, and the same training undisturbed beside them."""
    found: dict[str, Any] = {
        "name": peer.name,
        "title": peer.title,
        "version": peer.version(),
        "remark": peer.remark,
    }
    where, alone = folder / peer.name, folder / f"{peer.name}-undisturbed"
    more: dict[str, Any] = {"epochs": plan.epochs, "limit_s": plan.limit_s}
    try:
        course = drive.through(peer, place, where, events=plan.events, **more)
        attempts = read_attempts(where / "attempts")
        found |= figures.of_course(
            course,
            attempts,
            steps_per_epoch=STEPS_PER_EPOCH,
            steps=plan.steps,
            bare_step_s=bare_step_s / peer.nodes,
        )
        if not plan.sees_bits:
            return found
        undisturbed = drive.through(peer, place, alone, events=(), **more)
        if undisturbed.failure:
            raise RuntimeError(f"undisturbed: {undisturbed.failure}")
        whole = read_attempts(alone / "attempts")
        found |= figures.of_samples(attempts, whole, steps_per_epoch=STEPS_PER_EPOCH)
        ends = _weights(where)
        found["equal_bits"] = None if ends is None else ends == _weights(alone)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        found |= {"finished": False, "failure": str(error), "by_hand": []}
    if not found["finished"]:
        say(f"{peer.title} did not come to its end: {found['failure']}")
    return found


def _limit(events: Sequence[Event], bare_s: float) -> float:
    """The goodput of somebody who loses nothing but what Slurm takes."""
    held_s = sum(event.hold_s for event in events)
    queued_s = BEGIN_DELAY_S * sum(event.kind != "suspend" for event in events)
    return bare_s / (bare_s + held_s + queued_s)


def _weights(folder: Path) -> str | None:
    """The hash that a training has left at its end."""
    mark = folder / "done.json"
    return str(json.loads(mark.read_text())["weights_sha256"]) if mark.exists() else None


def say(words: str) -> None:
    """To people who wait: not a part of the result."""
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def main() -> None:
    options = parser("hydroslurm and its peers in one storm.")
    options.add_argument("--peers", help=f"some of {','.join(PEERS)}")
    options.add_argument("--finish", action="store_true", help="minutes until done, with failures")
    chosen = options.parse_args()
    alone = tuple(name for name, peer in PEERS.items() if peer.nodes == 1)
    names = FINISH_PEERS if chosen.finish else alone
    names = tuple(chosen.peers.split(",")) if chosen.peers else names
    unknown = set(names) - set(PEERS)
    if unknown:
        options.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    wanted = [peer for name, peer in PEERS.items() if name in names]
    plan = plan_of(quick=chosen.quick, finish=chosen.finish)
    with scratch("compare") as folder:
        result = compare(wanted, plan, folder)
    if not chosen.json:
        name = "finish" if chosen.finish else "compare"
        print(table({**result, "environment": environment()}, BLOCKS[name]))
        chosen.json = True
    finish(chosen, "", result)


if __name__ == "__main__":
    main()
