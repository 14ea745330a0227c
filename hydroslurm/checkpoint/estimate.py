"""Estimates how long a save will take from how long the last ones took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hydroslurm.checkpoint.storage import TimedSyncs
from hydroslurm.checkpoint.store import Checkpoint

SAMPLES = 5
"""How many of the last saves count; the slowest of them decides."""

ASSUMED_FIXED_S = 1.0
"""Pessimistic duration of saving an empty state, until something is measured."""

ASSUMED_BYTES_PER_S = 100e6
"""Pessimistic throughput until something is measured: one job's share of a busy network file
system."""

USUAL_SYNCS = 4
"""Until this attempt has saved: what a manifest's ``save_s`` covers for one rank (three files), and
the manifest itself."""


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
        self._syncs_of_one = USUAL_SYNCS
        self._earlier = deque(
            ((found.manifest.save_s, found.manifest.state_bytes) for found in earlier),
            maxlen=SAMPLES,
        )
        self._seen: deque[tuple[float, int]] = deque(maxlen=SAMPLES)

    def add(self, seconds: float, *, state_bytes: int, syncs: int = 0) -> None:
        """Record a save of this attempt and how many syncs it made."""
        self._seen.append((seconds, state_bytes))
        self._syncs_of_one = syncs or self._syncs_of_one

    def expect_s(self, state_bytes: int) -> float:
        """How long a state of this size will take, in seconds.

        The slowest of the last saves counts, of this attempt or, without any, of earlier ones. A
        larger state takes proportionally longer, or longer by the extra bytes at the assumed
        throughput, whichever is less: most of a tiny save does not depend on its size. For the same
        reason a smaller one is not expected to be faster. The latest syncs are a lower bound,
        including those of saves that failed, were given up or are still under way.
        """
        synced_s = 0.0 if self._syncs is None else self._syncs.latest_s(self._syncs_of_one)
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
