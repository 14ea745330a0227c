"""How often a run saves while it trains."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any

import msgspec

_META = "cadence"
_WRITING = 0.1
"""At most this share of the time is spent writing: others use the file system, too."""

_Seconds = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Cadence:
    """How often a run saves, and the measurements behind that.

    Attributes:
        every_steps: 0: never by steps.
        every_s: upper bound: the most work that a crash may cost; 0: never by the clock.
        stall_s: how long the last periodic save held up the training; 0 until measured.
        save_s: how long a save takes until it is committed.
        losses: attempts of this run that lost work. A stop saves, so it is none.
        ran_s: how long all attempts have run.
    """

    every_steps: int = 0
    every_s: _Seconds = 0.0
    stall_s: _Seconds = 0.0
    save_s: _Seconds = 0.0
    losses: Annotated[int, msgspec.Meta(ge=0)] = 0
    ran_s: _Seconds = 0.0

    @cached_property
    def interval_s(self) -> float:
        """Seconds between two saves: Young's optimum, sqrt(2 * stall * mean time between losses),
        within what the disk and ``every_s`` allow."""
        if not (self.losses and self.stall_s):
            return self.every_s
        best_s = math.sqrt(2 * self.stall_s * self.ran_s / self.losses)
        return min(self.every_s, max(best_s, self.save_s / _WRITING))

    def is_due_by_step(self, step: int) -> bool:
        """The same on all ranks."""
        return bool(self.every_steps) and step % self.every_steps == 0

    def is_due_by_clock(self, last_save_mono_s: float) -> bool:
        """Sooner on one rank than on another. Reads a clock only with ``every_s``."""
        return bool(self.every_s) and time.monotonic() - last_save_mono_s >= self.interval_s

    def reason(self) -> str:
        """One sentence for people, with what was measured."""
        plural = "" if self.losses == 1 else "es"
        return (
            f"a save stalls the training {_time(self.stall_s)} and is written in "
            f"{_time(self.save_s)}; {self.losses} loss{plural} of work in {_time(self.ran_s)} -> "
            f"a save every {_time(self.interval_s)}; every_s bounds it at {_time(self.every_s)}"
        )

    def to_meta(self) -> dict[str, Any]:
        """For a manifest."""
        return {_META: asdict(self)}

    @classmethod
    def of(cls, meta: Any) -> Cadence:
        """That of a checkpoint's writer, from its manifest; empty where it is not known."""
        try:
            return msgspec.convert(msgspec.convert(meta, dict[str, Any])[_META], cls)
        except (msgspec.ValidationError, KeyError):
            return cls()


def _time(seconds: float) -> str:
    for unit, unit_s in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{1e3 * seconds:.2g} ms"
