"""A clock to judge others by: it stands still while its own process does."""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Monotonic seconds in which this process could have heard somebody, or done something.

    Linux's monotonic clock runs on while a process is stopped (SIGSTOP, a suspended job, a frozen
    cgroup) or gets no CPU. A process that wakes up finds that everybody has been silent and that
    all deadlines are over, where only itself was away. So a gap of more than two periods between
    two readings counts as one period: starved for good, it is slow, and does not stand.

    Not thread-safe: it belongs to the loop that reads it.

    Attributes:
        absences: how many such gaps there were. A detector that finds another number than at its
            last look grants everybody the whole time again: they may have been away as well, and
            wake up later.
    """

    def __init__(
        self, period_s: float = 1.0, *, monotonic: Callable[[], float] | None = None
    ) -> None:
        """``period_s``: it is read at least so often. ``monotonic``: default ``time.monotonic``."""
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
