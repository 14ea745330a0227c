"""A clock for judging other processes: it stands still while this process does."""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Monotonic seconds during which this process was able to run.

    Linux's monotonic clock runs on while a process is stopped (SIGSTOP, a suspended job, a frozen
    cgroup) or gets no CPU. A process that wakes up finds every peer silent and every deadline past,
    although only the process itself was away. So a gap of more than two periods between two
    readings counts as one period. Under permanent starvation the clock is slow; it never stops.

    Not thread-safe: it belongs to the loop that reads it.

    Attributes:
        absences: number of such gaps. A detector that sees it change gives every peer the whole
            time again: peers may have been away too, and may wake up later.
    """

    def __init__(
        self, period_s: float = 1.0, *, monotonic: Callable[[], float] | None = None
    ) -> None:
        """``period_s``: upper bound between two readings. ``monotonic``: the clock beneath."""
        self.absences = 0
        self._period_s = period_s
        self._monotonic = monotonic or time.monotonic
        self._read_s = self._monotonic()
        self._away_s = 0.0

    def now_s(self) -> float:
        """Comparable with readings of this clock alone; until the first absence the monotonic
        time."""
        before_s, self._read_s = self._read_s, self._monotonic()
        gap_s = self._read_s - before_s
        if gap_s > 2 * self._period_s:
            self.absences += 1
            self._away_s += gap_s - self._period_s
        return self._read_s - self._away_s
