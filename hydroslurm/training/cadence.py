"""How often a run saves while it trains."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from hydroslurm.core.decoding import Count, Seconds
from hydroslurm.core.rundir import SAVE_EVERY_ENV
from hydroslurm.errors import UsageError


@dataclass(frozen=True)
class Cadence:
    """How often a run saves, and the measurements behind that.

    Attributes:
        every_steps: 0: never by steps.
        every_s: upper bound: the most work that a crash may cost; 0: never by the clock.
        stall_s, save_s: how long the last save held up the training, and took; 0: not measured.
        losses, ran_s: how many attempts lost work, and how long all have run.
    """

    every_steps: Count = 0
    every_s: Seconds = 600.0
    stall_s: Seconds = 0.0
    save_s: Seconds = 0.0
    losses: Count = 0
    ran_s: Seconds = 0.0

    @cached_property
    def interval_s(self) -> float:
        """Seconds between two saves: Young's optimum, as far as the disk and ``every_s`` allow."""
        if not (self.losses and self.stall_s):
            return self.every_s
        best_s = math.sqrt(2 * self.stall_s * self.ran_s / self.losses)
        # at most a tenth of the time is spent writing: others use the file system, too
        return min(self.every_s, max(best_s, 10 * self.save_s))

    def is_due_by_clock(self, last_save_mono_s: float) -> bool:
        """Sooner on one rank than on another. Reads a clock only with ``every_s``."""
        return bool(self.every_s) and time.monotonic() - last_save_mono_s >= self.interval_s

    def reason(self) -> str:
        """One sentence for people, with what was measured."""
        return (
            f"a save stalls the training {self.stall_s:.2g} s and takes {self.save_s:.2g} s; "
            f"losses of work in {self.ran_s / 3600:.3g} h: {self.losses} (a stop saves, and is "
            f"none) -> a save every {self.interval_s:.3g} s; every_s={self.every_s:g} bounds it"
        )

    @classmethod
    def of(cls, meta: object) -> Cadence:
        """Read the ``meta`` of a manifest; empty where it does not say."""
        try:
            return msgspec.convert(msgspec.convert(meta, dict)["cadence"], cls)
        except (msgspec.ValidationError, KeyError):
            return cls()


def cadence_of(
    every_steps: int | None, every_s: float | None, environ: Mapping[str, str]
) -> Cadence:
    """From the arguments, None for what was not said, and HYDROSLURM_SAVE_EVERY_S.

    Raises:
        UsageError: a negative one; a variable that is no number.
    """
    if text := environ.get(SAVE_EVERY_ENV):
        try:
            every_s = float(text)
        except ValueError:
            raise UsageError(f"{SAVE_EVERY_ENV}={text!r}: wanted seconds, such as 600") from None
    for name, value in (("every_steps", every_steps), ("every_s", every_s)):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name}={value}: wanted 0 (never) or a finite number above it")
    if every_steps is None and every_s is None:
        return Cadence()
    return Cadence(every_steps or 0, every_s or 0.0)
