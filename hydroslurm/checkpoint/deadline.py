"""What is still worth saving before a deadline. Pure: seconds and steps in, a choice and a
sentence for people out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

SAFETY = 1.5
"""How much longer than expected a save is allowed to take before it no longer counts as fitting.
The disk is busiest at the very moment when a whole node is preempted."""


class Action(str, Enum):
    """What to do with the time that is left. The value is the word in events and messages."""

    NOTHING = "nothing"
    """This very state is committed."""
    FULL = "full"
    """Save."""
    WAIT_THEN_FULL = "wait_then_full"
    """Let the save in flight finish, then save."""
    ABANDON_THEN_FULL = "abandon_then_full"
    """Abandon the save in flight, and save."""
    WAIT_ONLY = "wait_only"
    """Let the save in flight finish; no other is expected to be in time."""
    KEEP = "keep"
    """Nothing is expected to be in time: what is committed stays."""


class Before(str, Enum):
    """What happens to the save in flight before the save of a stop begins."""

    NONE = "none"
    """There is none."""
    WAIT = "wait"
    """Wait for it, for ``Choice.patience_s`` at most."""
    ABANDON = "abandon"
    """Abandon it at once."""


@dataclass(frozen=True)
class InFlight:
    """The save under way.

    Attributes:
        step: whose state it writes.
        remaining_s: how much longer it is expected to take (see :func:`remaining_s`).
        is_this: it writes the very state that is to be saved, not an older one of its step.
    """

    step: int
    remaining_s: float
    is_this: bool = False


@dataclass(frozen=True)
class Situation:
    """What is known when a stop has reached its safe point.

    Attributes:
        step: training steps completed.
        left_s: seconds until the deadline; negative once it has passed.
        save_s: what a save is expected to take.
        in_flight: the save under way.
        committed_step: newest committed step; None if there is none.
        is_committed: it is the very state that is to be saved.
    """

    step: int
    left_s: float
    save_s: float
    in_flight: InFlight | None = None
    committed_step: int | None = None
    is_committed: bool = False


@dataclass(frozen=True)
class Choice:
    """What to do, in the order of the attributes.

    Whatever the action, a save of this state is tried at the end (except for NOTHING, and where the
    save in flight is one): an estimate may be wrong, and a save that is killed costs
    nothing.

    Attributes:
        action: which case this is.
        before: what becomes of the save in flight.
        patience_s: with ``WAIT``, how long; after that it is given up if ``give_up``, else the stop
            is late.
        give_up: the save in flight is given up when patience ends.
        steps_at_risk: what is lost if no more is committed than is expected to be in time.
        reason: one sentence for people.
    """

    action: Action
    before: Before
    patience_s: float
    give_up: bool
    steps_at_risk: int
    reason: str


def choose(now: Situation) -> Choice:
    """The most that is expected to be committed in time.

    In order: a save of this step, after the one in flight if there is time for both (finished work
    is insurance), else instead of it; the older step in flight; what is committed already.
    """
    if now.is_committed:
        return _choice(now, Action.NOTHING, f"step {now.step} is committed already")
    if now.in_flight is not None and now.in_flight.is_this:
        return _flight_of_this_state(now)
    full_s = now.save_s * SAFETY
    flight_s = 0.0 if now.in_flight is None else now.in_flight.remaining_s * SAFETY
    if flight_s + full_s <= now.left_s:
        return _full(now)
    if full_s <= now.left_s:
        return _abandon(now)
    if now.in_flight is not None and flight_s <= now.left_s:
        return _wait_only(now, now.in_flight)
    return _keep(now)


def remaining_s(*, expected_s: float, elapsed_s: float) -> float:
    """What a save under way still needs. One that is late is given a quarter of its age again."""
    return max(expected_s - elapsed_s, elapsed_s / 4)


def _of(left_s: float) -> str:
    """The time that is left, to be added to a time that is needed; no word where nobody kills."""
    return "" if math.isinf(left_s) else f" of the {max(0.0, left_s):.1f} s that are left"


def _full(now: Situation) -> Choice:
    flight = now.in_flight
    if flight is None:
        reason = f"a full save needs about {now.save_s:.1f} s{_of(now.left_s)}"
        return _choice(now, Action.FULL, reason)
    reason = (
        f"the save of step {flight.step} needs about {flight.remaining_s:.1f} s more, and a full "
        f"save {now.save_s:.1f} s{_of(now.left_s)}: both fit"
    )
    return _choice(
        now,
        Action.WAIT_THEN_FULL,
        reason,
        before=Before.WAIT,
        patience_s=now.left_s - now.save_s * SAFETY,
        give_up=True,
    )


def _abandon(now: Situation) -> Choice:
    assert now.in_flight is not None
    reason = (
        f"{now.left_s:.1f} s are enough for a full save ({now.save_s:.1f} s), but not for the "
        f"save of step {now.in_flight.step} before it ({now.in_flight.remaining_s:.1f} s more)"
    )
    return _choice(now, Action.ABANDON_THEN_FULL, reason, before=Before.ABANDON)


def _wait_only(now: Situation, flight: InFlight) -> Choice:
    risk = _at_risk(now, flight.step)
    reason = (
        f"a full save needs about {now.save_s:.1f} s and {now.left_s:.1f} s are left; the save "
        f"of step {flight.step} can still be in time, with it {_steps(risk)}"
    )
    return _choice(
        now,
        Action.WAIT_ONLY,
        reason,
        at_risk=risk,
        before=Before.WAIT,
        patience_s=now.left_s,
    )


def _flight_of_this_state(now: Situation) -> Choice:
    """The save in flight is the one that the stop would make: it is never given up."""
    assert now.in_flight is not None
    if now.in_flight.remaining_s * SAFETY <= now.left_s:
        action, risk, end = Action.WAIT_ONLY, 0, "is in time"
    else:
        action, risk, end = Action.KEEP, _at_risk(now, None), "may be late"
    reason = (
        f"the save in flight is of this very step {now.step}: it needs about "
        f"{now.in_flight.remaining_s:.1f} s more{_of(now.left_s)}, and {end}"
    )
    return _choice(
        now,
        action,
        reason,
        at_risk=risk,
        before=Before.WAIT,
        patience_s=max(0.0, now.left_s),
    )


def _keep(now: Situation) -> Choice:
    """Nothing fits. What is nearest to its end is tried nevertheless."""
    risk = _at_risk(now, None)
    kept = "nothing is" if now.committed_step is None else f"step {now.committed_step} is"
    reason = (
        f"a full save needs about {now.save_s:.1f} s and {max(0.0, now.left_s):.1f} s are left: "
        f"{kept} committed, and {_steps(risk)} unless the save is faster than expected"
    )
    before = Before.NONE
    if now.in_flight is not None:
        sooner = now.in_flight.remaining_s < now.save_s
        before = Before.WAIT if sooner else Before.ABANDON
    return _choice(
        now,
        Action.KEEP,
        reason,
        at_risk=risk,
        before=before,
        patience_s=max(0.0, now.left_s),
    )


def _choice(
    now: Situation,
    action: Action,
    reason: str,
    *,
    at_risk: int = 0,
    before: Before = Before.NONE,
    patience_s: float = 0.0,
    give_up: bool = False,
) -> Choice:
    if now.in_flight is None:
        before, patience_s = Before.NONE, 0.0
    return Choice(action, before, patience_s, give_up, at_risk, reason)


def _at_risk(now: Situation, flight_step: int | None) -> int:
    """Steps since the newest that will be durable; all of them when none will be."""
    steps = [step for step in (now.committed_step, flight_step) if step is not None]
    return now.step - max(steps, default=0)


def _steps(count: int) -> str:
    if count == 0:
        return "what was changed since then is lost"
    return "1 step is lost" if count == 1 else f"{count} steps are lost"
