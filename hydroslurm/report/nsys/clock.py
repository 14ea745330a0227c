"""nsys's time in CLOCK_MONOTONIC, by the marks ``clock`` of a report.

nsys counts from the start of its recording, by a clock of its own: beside CLOCK_MONOTONIC, which
NTP slews, it drifts by microseconds in a second. The job emits marks ``clock`` whose payload is
CLOCK_MONOTONIC, read just before. nsys stamps such a mark late, by as long as the thread was held
up in between, and never early: so CLOCK_MONOTONIC minus nsys's time is never below what a mark
says, and of the marks around a moment the one that says most is the best.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Sequence

NEIGHBOURS = 8
"""Marks on each side that are looked at."""
DRIFT_MAX = 500e-6
"""What the kernel slews CLOCK_MONOTONIC by at most."""
DRIFT_MIN = 10e-6
_CLOSE_NS = 10_000_000
"""Closer marks measure each other's delay; the drift is no more than 5 us in this time."""
_APART_NS = 1_000_000_000
"""Marks further apart than this measure the drift."""


class Timebase:
    """The two clocks of one report, which all its processes share."""

    def __init__(self, marks: Sequence[tuple[int, int]]) -> None:
        """``marks``: nsys's time and the CLOCK_MONOTONIC of each, in any order."""
        ordered = sorted(marks)
        self._times = [nsys_ns for nsys_ns, _ in ordered]
        self._offsets = [mono_ns - nsys_ns for nsys_ns, mono_ns in ordered]
        self._drift = self._measure_drift()
        self._late_ns = self._measure_lateness()

    def mono(self, nsys_ns: int) -> tuple[int, int] | None:
        """CLOCK_MONOTONIC at a moment of nsys's time, and what it may be wrong by.

        None: there are fewer than two marks, so that nothing says how late they are.
        """
        if len(self._times) < 2:
            return None
        at = bisect.bisect_left(self._times, nsys_ns)
        near = range(max(0, at - NEIGHBOURS), min(len(self._times), at + NEIGHBOURS))
        lowest = sorted(
            (self._offsets[i] - self._drift * abs(self._times[i] - nsys_ns), i) for i in near
        )
        (second, _), (first, best) = lowest[-2:]
        away_ns = self._drift * abs(self._times[best] - nsys_ns)
        # the best one is late too, by about as much as it is earlier than the next best
        late_ns = first - second if self._late_ns is None else min(first - second, self._late_ns)
        return nsys_ns + self._offsets[best], round(away_ns + late_ns) + 1

    def nsys(self, mono_ns: int) -> int | None:
        """The reverse of :meth:`mono`, for bounds."""
        if not self._times:
            return None
        at = bisect.bisect_left(self._times, mono_ns - self._offsets[0])
        return mono_ns - self._offsets[min(at, len(self._times) - 1)]

    def epoch_offset_ns(self, session_epoch_ns: int | None) -> int | None:
        """What makes a wall clock of CLOCK_MONOTONIC, as both were when nsys began."""
        start = self.mono(0)
        return None if start is None or session_epoch_ns is None else session_epoch_ns - start[0]

    def _measure_lateness(self) -> float | None:
        """What nine of ten marks differ by from one that is close in time."""
        ordered = itertools.pairwise(zip(self._times, self._offsets, strict=True))
        close = sorted(abs(b[1] - a[1]) for a, b in ordered if b[0] - a[0] < _CLOSE_NS)
        return close[len(close) * 9 // 10] if close else None

    def _measure_drift(self) -> float:
        """Per nanosecond: the steepest between the best marks of groups a second apart."""
        groups: list[tuple[int, int]] = []
        for nsys_ns, offset in zip(self._times, self._offsets, strict=True):
            if groups and nsys_ns - groups[-1][0] < _APART_NS:
                groups[-1] = (groups[-1][0], max(groups[-1][1], offset))
            else:
                groups.append((nsys_ns, offset))
        slopes = [abs((b[1] - a[1]) / (b[0] - a[0])) for a, b in itertools.pairwise(groups)]
        if not slopes:
            return DRIFT_MAX
        return min(DRIFT_MAX, max(DRIFT_MIN, statistics.median(slopes)))
