"""How long a save takes here, and what becomes of the one in flight when a stop has to save a newer
state by a deadline. Pure but for :class:`TimedSyncs`, which has a clock."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # who lists jobs needs a number from here, and no torch
    from pathlib import Path

    from hydroslurm.checkpoint.manifest import Checkpoint
    from hydroslurm.checkpoint.storage import Storage

SAFETY = 1.5
"""How much longer than expected a save is allowed to take before it no longer counts as fitting.
The disk is busiest at the very moment when a whole node is preempted."""

FOREVER_S = 1e9
"""Time left where nobody kills: thirty years. Finite, as a wait has to be."""

SAMPLES = 5
"""How many of the last saves count; the slowest of them decides."""

ASSUMED_FIXED_S = 1.0
"""Pessimistic duration of saving an empty state, until something is measured."""

ASSUMED_BYTES_PER_S = 100e6
"""Pessimistic throughput until something is measured: one job's share of a busy network file
system."""


SYNCS = 4
"""How many are remembered: what a manifest's ``save_s`` covers for one rank (three files), and the
manifest itself."""


class TimedSyncs:
    """A storage that remembers how long its latest syncs took. Thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._latest_s: deque[float] = deque(maxlen=SYNCS)
        self._begun_mono_s: dict[int, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def fsync(self, fd: int) -> None:
        with self._timed():
            self._storage.fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        with self._timed():
            self._storage.fsync_dir(path)

    def latest_s(self) -> float:
        """How long the latest :data:`SYNCS` took together, including one that hangs now."""
        now_mono_s = time.monotonic()
        hanging = [now_mono_s - begun for begun in tuple(self._begun_mono_s.values())]
        return sum([*hanging, *reversed(tuple(self._latest_s))][:SYNCS])

    @contextmanager
    def _timed(self) -> Iterator[None]:
        thread, begun_mono_s = threading.get_ident(), time.monotonic()
        self._begun_mono_s[thread] = begun_mono_s
        try:
            yield
        finally:
            del self._begun_mono_s[thread]
            self._latest_s.append(time.monotonic() - begun_mono_s)


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
    """What a rank knows when a stop has reached its safe point.

    Attributes:
        left_s: seconds until the deadline, at most :data:`FOREVER_S`; negative once it has passed.
        save_s: what a save is expected to take.
        in_flight: the save under way.
        committed_step: newest committed step; None if there is none.
        is_committed: it is the very state that is to be saved.
    """

    left_s: float
    save_s: float
    in_flight: InFlight | None = None
    committed_step: int | None = None
    is_committed: bool = False


@dataclass(frozen=True)
class Choice:
    """What becomes of the save in flight before the state of the stop is saved.

    Attributes:
        reason: one sentence for people.
        wait_s: how long to wait for the save in flight.
        give_up: abandon it if it has not ended by then; else the save of the stop follows it.
    """

    reason: str
    wait_s: float = 0.0
    give_up: bool = False


def of_all_ranks(ranks: Sequence[Situation]) -> Situation:
    """The least time, the slowest disk, any save in flight, and what all ranks have committed."""
    flights = [one.in_flight for one in ranks if one.in_flight is not None]
    steps = [one.committed_step for one in ranks if one.committed_step is not None]
    flight = InFlight(
        max((one.step for one in flights), default=0),
        max((one.remaining_s for one in flights), default=0.0),
        is_this=all(one.is_this for one in flights),
    )
    return Situation(
        left_s=min(one.left_s for one in ranks),
        save_s=max(one.save_s for one in ranks),
        in_flight=flight if flights else None,
        committed_step=min(steps) if len(steps) == len(ranks) else None,
        is_committed=all(one.is_committed for one in ranks),
    )


def choose(step: int, now: Situation) -> Choice:
    """What is expected to commit the most in time.

    In order: a save of this step, after the one in flight if there is time for both (finished work
    is insurance), else instead of it; the older step in flight; what is committed already. The
    state of the stop is tried in any case (unless it is committed, or the save in flight is of
    it): an estimate may be wrong, and a save that is killed costs nothing.
    """
    if now.is_committed:
        return Choice(f"step {step} is committed already")
    flight, save_s, left_s = now.in_flight, now.save_s, max(0.0, now.left_s)
    rest_s = 0.0 if flight is None else flight.remaining_s * SAFETY
    of_left = "" if left_s >= FOREVER_S else f" of the {left_s:.1f} s that are left"
    if flight is not None and flight.is_this:  # what the stop would save itself: never given up
        return Choice(
            f"the save in flight is of this very step {step}: it needs about "
            f"{flight.remaining_s:.1f} s more{of_left}, and "
            f"{'is in time' if rest_s <= now.left_s else 'may be late'}",
            wait_s=left_s,
        )
    needs = f"a full save needs about {save_s:.1f} s"
    if save_s * SAFETY <= now.left_s:
        if flight is None:
            return Choice(needs + of_left)
        both = rest_s + save_s * SAFETY <= now.left_s
        return Choice(
            f"{needs}{of_left}, and the save of step {flight.step} before it "
            f"{flight.remaining_s:.1f} s more: {'both fit' if both else 'that one is given up'}",
            wait_s=left_s - save_s * SAFETY if both else 0.0,
            give_up=True,
        )
    committed = now.committed_step
    kept, newest = f"{'nothing' if committed is None else f'step {committed}'} is committed", 0
    if flight is not None and rest_s <= now.left_s:
        kept, newest = f"the save of step {flight.step} can still be in time", flight.step
    lost = step - max(committed or 0, newest)
    what = {0: "what was changed since then is lost", 1: "1 step is lost"}
    # nothing fits: what is nearest to its end is tried nevertheless
    waits = flight is not None and flight.remaining_s < save_s
    return Choice(
        f"{needs} and {left_s:.1f} s are left: {kept}, and "
        f"{what.get(lost, f'{lost} steps are lost')} unless the save is faster than expected",
        wait_s=left_s if waits else 0.0,
        give_up=flight is not None and not waits,
    )


def remaining_s(*, expected_s: float, elapsed_s: float) -> float:
    """What a save under way still needs. One that is late is given a quarter of its age again."""
    return max(expected_s - elapsed_s, elapsed_s / 4)
