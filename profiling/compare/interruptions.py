"""The storm of preemptions that every peer meets: the same moments for the same seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["suspend", "preempt", "requeue"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Event:
    """One preemption.

    Attributes:
        at_s: since the first step of the training.
        kind: ``suspend`` and, ``hold_s`` later, resume; ``preempt`` by an urgent job; ``requeue``
            by an operator.
    """

    at_s: float
    kind: Kind
    hold_s: float = 0.0


def storm(
    *,
    seed: int,
    counts: Mapping[Kind, int],
    mean_gap_s: float,
    hold_s: tuple[float, float] = (2.5, 4.0),
    away_s: float = 18.0,
) -> tuple[Event, ...]:
    """Events in the order of time.

    The gaps are those of a Poisson process (exponential). A gap begins when the event before is
    usually over: a second after the resume of a suspend, ``away_s`` after a preemption. Otherwise
    events would fall on jobs that wait in the queue, and harm the slow less than the quick.

    Args:
        counts: how many of each kind; their order is the seed's.
    """
    chance = random.Random(seed)
    kinds = [kind for kind in KINDS for _ in range(counts.get(kind, 0))]
    chance.shuffle(kinds)
    events, now_s = [], 0.0
    for kind in kinds:
        now_s += chance.expovariate(1 / mean_gap_s)
        held_s = chance.uniform(*hold_s) if kind == "suspend" else 0.0
        events.append(Event(now_s, kind, held_s))
        now_s += held_s + 1.0 if kind == "suspend" else away_s
    return tuple(events)
