"""The exit statuses that mean something to a batch script, and the way out with them."""

from __future__ import annotations

RUN_AGAIN = 75
"""Saved, not finished: the same command continues. sysexits' EX_TEMPFAIL. A batch script turns it
into a requeue where the rank could not do that itself."""

MUST_NOT_RUN_AGAIN = 93
"""A budget is spent, or lives pass without progress: a requeue would not help. The number that
NVIDIA's resiliency extension ends with in the same case."""

FAILED = 1
"""Another rank failed, and srun or PMIx ended this one for it. Nothing brings the job back."""

CANCELLED = 143
"""Ended by a person, saved: 128 + SIGTERM, as a shell would say it."""


class Departure(SystemExit):
    """Ends the process on purpose, with a status that says what is to follow."""

    @classmethod
    def finished(cls) -> Departure:
        """Nothing is left to do."""
        return cls(0)

    @classmethod
    def must_not_run_again(cls) -> Departure:
        """A requeue would not help."""
        return cls(MUST_NOT_RUN_AGAIN)
