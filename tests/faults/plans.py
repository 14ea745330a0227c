"""What is done to a run, drawn from a seed: a round is the same whenever it is drawn again. Pure.

A *moment* is a place in the program of one rank, counted within one attempt:

    start, group             the process begins; its process group is there
    claimed                  the signals that mean a stop are its Run's from now on
    step, check              the training thread comes to a safe point, to a check for a stop
    event KIND               the rank has written such an event
    agree T, agreed T        it hands a value in for the topic T, with numbers left out; it was told
    rename, renamed          around the commit of a checkpoint
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

AT_JOIN = (
    "start",
    "group",
    "event installed",
    "claimed",
    "event ranks_joined",
    "agree run/finished",
    "agreed run/finished",
    "agree resume",
    "agreed run/attempt",
    "event attempt_began",
)
IN_A_SAVE = (
    "event save_started",
    "event save_staged",
    "agree save/open",
    "agreed save/open",
    "agree save/written",
    "agreed save/written",
    "rename",
    "renamed",
    "agree save/commit",
    "agreed save/commit",
    "event save_committed",
)
IN_A_STOP = (
    "event stop_requested",
    "event safe_point",
    "agree run/stop",
    "agreed run/stop",
    "agree save/open",
    "agreed save/open",
    "agree save/written",
    "rename",
    "agree save/commit",
    "agreed save/commit",
    "agree run/plan",
    "agreed run/plan",
    "agree run/exit",
    "agreed run/exit",
)
IN_A_PAUSE = ("event gate_closed", "event parked", "event all_parked", "event resumed")
AT_THE_END = ("agree run/finish", "agreed run/finish", "event run_finished")

WEIGHTS = {
    "term": 10,
    "urg": 5,
    "stop_all": 8,
    "term_twice": 4,
    "pause": 12,
    "suspend": 6,
    "suspend_coordinator_too": 3,
    "kill": 18,
    "freeze": 10,
    "delay": 14,
    "kill_coordinator": 6,
    "freeze_coordinator": 5,
    "error": 4,
}
OF_THE_COORDINATOR = ("kill_coordinator", "freeze_coordinator")
"""Done by rank 0, the only one that knows it."""


@dataclass(frozen=True)
class Fault:
    """One thing that is done to a run.

    Attributes:
        rank: whose moment it is, and to whom it is done.
        nth: the how-manieth time it comes to that moment in this attempt, from 1.
        what: one of ``WEIGHTS``; or ``await_commit``, a delay until there is a checkpoint; or
            ``resume``, the end of a pause at another moment.
        seconds: how long it lasts, where it lasts.
    """

    rank: int
    moment: str
    nth: int
    what: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One round: a run and what is done to it, attempt by attempt; its last attempt is left
    alone."""

    seed: int
    number: int
    world: int
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    attempts: tuple[tuple[Fault, ...], ...] = ()


def draw(seed: int, number: int) -> Plan:
    """Round ``number`` of a seed."""
    source = random.Random(f"{seed}/{number}")
    world = source.choice((2, 3, 3, 4))
    model = "fsdp" if world < 4 and source.random() < 0.2 else "ddp"
    options: dict[str, Any] = {"keep": source.choice((2, 100))}
    if source.random() < 0.3:
        options["every_s"] = 0.01
    else:
        options["every_steps"] = source.choice((1, 2, 3))
    attempts = tuple(_attempt(source, world) for _ in range(source.choice((1, 1, 2))))
    return Plan(seed, number, world, model, options, attempts)


def _attempt(source: random.Random, world: int) -> tuple[Fault, ...]:
    """One to three faults, and what ends the attempt should they leave it alive."""
    faults = [
        fault for _ in range(source.choice((1, 1, 2, 2, 3))) for fault in _faults(source, world)
    ]
    if source.random() < 0.1:
        return tuple(faults)  # it may come to the end of the training
    end = source.choice(("term", "term", "urg", "stop_all"))
    return (*faults, Fault(source.randrange(world), "step", source.randint(4, 9), end))


def _faults(source: random.Random, world: int) -> list[Fault]:
    moments = source.choices(
        (("step",), IN_A_SAVE, IN_A_STOP, AT_JOIN, IN_A_PAUSE, AT_THE_END),
        weights=(36, 24, 20, 10, 8, 2),
    )[0]
    first = _one(source, world, moments)
    found = [first]
    if moments is IN_A_PAUSE:  # so that there is one
        found.append(_at_a_step(source, world, what="pause"))
    if source.random() < 0.15:  # two at once
        rank = (first.rank + 1) % world
        what = _what(source, ("error", *OF_THE_COORDINATOR))
        found.append(Fault(rank, first.moment, first.nth, what, _seconds(source, what)))
    return found


def _one(source: random.Random, world: int, moments: Sequence[str]) -> Fault:
    moment = source.choice(moments)
    what = _what(source, () if moment == "step" else ("error",))
    nth = source.randint(1, 6) if moment == "step" else source.choice((1, 1, 1, 2))
    rank = 0 if what in OF_THE_COORDINATOR or "rename" in moment else source.randrange(world)
    return Fault(rank, moment, nth, what, _seconds(source, what))


def _at_a_step(source: random.Random, world: int, *, what: str) -> Fault:
    return Fault(
        source.randrange(world), "step", source.randint(1, 5), what, _seconds(source, what)
    )


def _what(source: random.Random, without: Sequence[str]) -> str:
    weights = {name: weight for name, weight in WEIGHTS.items() if name not in without}
    return source.choices(list(weights), weights=list(weights.values()))[0]


def _seconds(source: random.Random, what: str) -> float:
    longest_s = {
        "pause": 0.6,
        "suspend": 1.0,
        "suspend_coordinator_too": 1.0,
        "freeze": 1.5,
        "freeze_coordinator": 1.5,
        "delay": 0.6,
    }
    return round(source.uniform(0.05, longest_s[what]), 2) if what in longest_s else 0.0
