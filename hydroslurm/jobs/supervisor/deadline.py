"""How long a job has held its nodes, over all its lives.

The time in which the supervisor was stopped together with the ranks (``scontrol suspend``) is left
out, as Slurm leaves it out of a time limit: a tick that comes much too late says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

LONGEST_TICK_S = 2.0
"""More than this between two ticks was not spent running."""
WRITE_EVERY_S = 5.0


class ActiveTime:
    """Counts it, and keeps it in a file."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.seconds = _read(path)
        self._clock = clock
        self._ticked_mono_s = self._written_mono_s = clock()

    def tick(self) -> float:
        """Count up to now; the seconds so far."""
        now_s = self._clock()
        self.seconds += min(now_s - self._ticked_mono_s, LONGEST_TICK_S)
        self._ticked_mono_s = now_s
        if now_s - self._written_mono_s > WRITE_EVERY_S:
            self.write()
        return self.seconds

    def write(self) -> None:
        """Put it into the file; what cannot be written is counted anew at the next life."""
        self._written_mono_s = self._clock()
        temporary = self.path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps({"active_s": round(self.seconds, 3)}))
            temporary.replace(self.path)
        except OSError:
            pass


def _read(path: Path) -> float:
    try:
        return float(json.loads(path.read_text())["active_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
