"""What is still worth saving before a deadline: what a save takes here, what all ranks know of it,
and a choice and a sentence for people."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from hydroslurm.checkpoint.save_round import SaveRound, parsed

if TYPE_CHECKING:  # who lists jobs needs a number from here, and no torch
    from hydroslurm.checkpoint.storage import TimedSyncs
    from hydroslurm.checkpoint.store import Checkpoint

SAFETY = 1.5
"""How much longer than expected a save is allowed to take before it no longer counts as fitting.
The disk is busiest at the very moment when a whole node is preempted."""

FOREVER_S = 1e9
"""Time left where nobody kills. Finite, as JSON has no infinity: thirty years."""

SAMPLES = 5
"""How many of the last saves count; the slowest of them decides."""

ASSUMED_FIXED_S = 1.0
"""Pessimistic duration of saving an empty state, until something is measured."""

ASSUMED_BYTES_PER_S = 100e6
"""Pessimistic throughput until something is measured: one job's share of a busy network file
system."""


class Pace:
    """The last saves to one store."""

    def __init__(
        self, earlier: Iterable[Checkpoint] = (), *, syncs: TimedSyncs | None = None
    ) -> None:
        """
        Args:
            earlier: what earlier attempts committed, oldest first.
            syncs: of this store; they reveal a disk that has become slow before a save is over.
        """
        self._syncs = syncs
        self._earlier = deque(
            ((found.manifest.save_s, found.manifest.state_bytes) for found in earlier),
            maxlen=SAMPLES,
        )
        self._seen: deque[tuple[float, int]] = deque(maxlen=SAMPLES)

    def add(self, seconds: float, *, state_bytes: int) -> None:
        """Record a save of this attempt."""
        self._seen.append((seconds, state_bytes))

    def expect_s(self, state_bytes: int) -> float:
        """How long a state of this size will take, in seconds.

        The slowest of the last saves counts, of this attempt or, without any, of earlier ones. A
        larger state takes proportionally longer, or longer by the extra bytes at the assumed
        throughput, whichever is less: most of a tiny save does not depend on its size. For the same
        reason a smaller one is not expected to be faster. The latest syncs are a lower bound,
        including those of saves that failed, were given up or are still under way.
        """
        synced_s = 0.0 if self._syncs is None else self._syncs.latest_s()
        samples = tuple(self._seen or self._earlier)
        if not samples:
            return max(synced_s, ASSUMED_FIXED_S + state_bytes / ASSUMED_BYTES_PER_S)
        slowest_s = max(
            min(
                seconds * max(1.0, state_bytes / max(1, size)),
                seconds + max(0, state_bytes - size) / ASSUMED_BYTES_PER_S,
            )
            for seconds, size in samples
        )
        return max(synced_s, slowest_s)


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
        left_s: seconds until the deadline, at most :data:`FOREVER_S`; negative once it has passed.
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
    """What becomes of the save in flight before this state is saved.

    This state is always tried (unless it is committed, or the save in flight is of it): an estimate
    may be wrong, and a save that is killed costs nothing.

    Attributes:
        reason: one sentence for people.
        wait_s: how long to wait for the save in flight.
        give_up: abandon it if it has not ended by then; else the save of this state follows it.
        steps_at_risk: what is lost if no more is committed than is expected to be in time.
        is_committed: there is nothing to do.
    """

    reason: str
    wait_s: float = 0.0
    give_up: bool = False
    steps_at_risk: int = 0
    is_committed: bool = False


def choose(now: Situation) -> Choice:
    """The most that is expected to be committed in time.

    In order: a save of this step, after the one in flight if there is time for both (finished work
    is insurance), else instead of it; the older step in flight; what is committed already.
    """
    flight, left_s, full_s = now.in_flight, max(0.0, now.left_s), now.save_s * SAFETY
    if now.is_committed:
        return Choice(f"step {now.step} is committed already", is_committed=True)
    rest_s = 0.0 if flight is None else flight.remaining_s * SAFETY
    if flight is not None and flight.is_this:  # what the stop would save itself: never given up
        in_time = rest_s <= now.left_s
        reason = (
            f"the save in flight is of this very step {now.step}: it needs about "
            f"{flight.remaining_s:.1f} s more{_of(left_s)}, and "
            f"{'is in time' if in_time else 'may be late'}"
        )
        return Choice(reason, left_s, steps_at_risk=0 if in_time else _at_risk(now, None))
    reason = f"a full save needs about {now.save_s:.1f} s"
    if full_s <= now.left_s:
        reason += _of(left_s)
        if flight is None:
            return Choice(reason)
        both = rest_s + full_s <= now.left_s
        reason += (
            f", and the save of step {flight.step} before it {flight.remaining_s:.1f} s more: "
            f"{'both fit' if both else 'that one is given up'}"
        )
        return Choice(reason, left_s - full_s if both else 0.0, give_up=True)
    in_time = flight is not None and rest_s <= now.left_s
    committed = "nothing" if now.committed_step is None else f"step {now.committed_step}"
    kept = f"{committed} is committed"
    if flight is not None and in_time:
        kept = f"the save of step {flight.step} can still be in time"
    risk = _at_risk(now, flight if in_time else None)
    reason += (
        f" and {left_s:.1f} s are left: {kept}, and {_steps(risk)} unless the save is faster than "
        "expected"
    )
    # nothing fits: what is nearest to its end is tried nevertheless
    waits = flight is not None and flight.remaining_s < now.save_s
    give_up = flight is not None and not waits
    return Choice(reason, left_s if waits else 0.0, give_up=give_up, steps_at_risk=risk)


def remaining_s(*, expected_s: float, elapsed_s: float) -> float:
    """What a save under way still needs. One that is late is given a quarter of its age again."""
    return max(expected_s - elapsed_s, elapsed_s / 4)


def of_all_ranks(here: Situation, save_round: SaveRound) -> Situation:
    """The least time, the slowest disk, any save in flight, and what all ranks have committed.

    Raises:
        SaveFailed, UnsavableState: on all ranks; one cannot take part or is gone.
    """
    if save_round.is_solo:
        return here
    told = save_round.settle("situation", asdict(here), left_s=here.left_s)
    ranks = [parsed(Situation, answer, rank=rank) for rank, answer in told.items()]
    flights = [one.in_flight for one in ranks if one.in_flight is not None]
    steps = [one.committed_step for one in ranks if one.committed_step is not None]
    flight = InFlight(
        max((one.step for one in flights), default=0),
        max((one.remaining_s for one in flights), default=0.0),
        is_this=all(one.is_this for one in flights),
    )
    return replace(
        here,
        left_s=min(one.left_s for one in ranks),
        save_s=max(one.save_s for one in ranks),
        in_flight=flight if flights else None,
        committed_step=min(steps) if len(steps) == len(ranks) else None,
        is_committed=all(one.is_committed for one in ranks),
    )


def all_done(done: bool, save_round: SaveRound, *, left_s: float) -> bool:
    """Whether no rank has anything left to save.

    Raises:
        SaveFailed: on all ranks; one is gone.
    """
    told = save_round.settle("done", {"done": done}, left_s=left_s)
    return all(parsed(dict[str, bool], answer, rank=rank)["done"] for rank, answer in told.items())


def _of(left_s: float) -> str:
    """The time that is left, to be added to a time that is needed; no word where nobody kills."""
    return "" if left_s >= FOREVER_S else f" of the {left_s:.1f} s that are left"


def _at_risk(now: Situation, in_time: InFlight | None) -> int:
    """Steps since the newest that will be durable; all of them when none will be."""
    flight_step = 0 if in_time is None else in_time.step
    return now.step - max(now.committed_step or 0, flight_step)


def _steps(count: int) -> str:
    if count == 0:
        return "what was changed since then is lost"
    return "1 step is lost" if count == 1 else f"{count} steps are lost"
