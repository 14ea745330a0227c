"""Histogram of how long ranks took to park, counted over whole event files; it only grows."""

from __future__ import annotations

import bisect
import contextlib
import stat
from dataclasses import dataclass, field
from pathlib import Path

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.files import Tail

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.01, 0.1, 1.0, 10.0)
_PARKED = b'"kind":"parked"'


@dataclass
class Parks:
    """Counts per bucket, the last one for all that is longer; and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has them: upper bound, how many up to it."""
        total, found = 0, []
        for bound, count in zip((*BOUNDS_S, float("inf")), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return found


class ParkCounter:
    """Follow one event file from its beginning; only lines of ``parked`` events are parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parks = Parks()
        self._tail = Tail(path)
        self._pause: tuple[int, int | None] | None = None

    def read(self, *, budget_bytes: int) -> int:
        """Count on, reading at most so much; returns how much that was. What was counted in a file
        that was replaced stays counted."""
        before = self._tail.bytes_read
        with contextlib.suppress(OSError):
            for line in self._tail.lines(most_bytes=budget_bytes):
                if _PARKED in line:
                    self._count(line)
        return self._tail.bytes_read - before

    def unread_bytes(self) -> int:
        """How much of the file is still to be read."""
        try:
            now = self.path.lstat()
        except OSError:
            return 0
        return max(0, now.st_size - self._tail.offset) if stat.S_ISREG(now.st_mode) else 0

    def _count(self, line: bytes) -> None:
        try:
            event = Event.from_json(line)
        except ValueError:
            return
        park_us, pause = event.data.get("park_us"), (event.pid, event.data.get("pause"))
        # a rank that is let through to a collective parks again: the first time is what it took
        if event.kind is EventKind.PARKED and park_us is not None and pause != self._pause:
            self._pause = pause
            self.parks.add(park_us / 1e6)
