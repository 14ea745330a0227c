"""How long ranks took to park, counted over whole event files: a histogram that only grows."""

from __future__ import annotations

import bisect
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.files import open_regular

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.01, 0.1, 1.0, 10.0)
_CHUNK_BYTES = 4 * 1024 * 1024
_WORD = b'"kind":"parked"'


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
    """Follows one event file from its beginning. A line is only looked into when it says that
    something was parked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parks = Parks()
        self._offset = 0
        self._rest = b""
        self._pause: tuple[int, int | None] | None = None

    def read(self, *, budget_bytes: int) -> int:
        """Count on, reading at most so much; returns how much that was."""
        read = 0
        try:
            now = self.path.lstat()
            if not stat.S_ISREG(now.st_mode):
                return 0
            if now.st_size < self._offset:  # another file: what was counted stays counted
                self._offset, self._rest = 0, b""
            while read < budget_bytes and self._offset < now.st_size:
                read += self._chunk(min(_CHUNK_BYTES, budget_bytes - read))
        except OSError:
            pass
        return read

    def unread_bytes(self) -> int:
        try:
            now = self.path.lstat()
        except OSError:
            return 0
        return max(0, now.st_size - self._offset) if stat.S_ISREG(now.st_mode) else 0

    def _chunk(self, most: int) -> int:
        fd = open_regular(self.path)
        try:
            text = os.pread(fd, most, self._offset)
        finally:
            os.close(fd)
        if not text:
            raise OSError("shorter than it was")
        self._offset += len(text)
        lines = (self._rest + text).split(b"\n")
        self._rest = lines.pop()[-_CHUNK_BYTES:]
        for line in lines:
            if _WORD in line:
                self._count(line)
        return len(text)

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
