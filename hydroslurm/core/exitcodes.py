"""The exit statuses that mean something to a batch script, and the way out with them."""

from __future__ import annotations

from typing import Any

RUN_AGAIN = 75
"""Saved, not finished: the same command continues. sysexits' EX_TEMPFAIL. A batch script turns it
into a requeue where the rank could not do that itself."""

MUST_NOT_RUN_AGAIN = 93
"""A budget is spent, or attempts pass without progress: a requeue would not help. The number that
NVIDIA's resiliency extension ends with in the same case."""

FAILED = 1
"""Another rank failed, and srun or PMIx ended this one for it. Nothing brings the job back."""

CANCELLED = 143
"""Ended by a person, saved: 128 + SIGTERM, as a shell would say it."""


_status: Any = None


def leaves_with(status: Any) -> None:
    """The process is about to end with this status, unless somebody catches that."""
    global _status
    _status = status


def left_with() -> Any:
    """The status that was told last; None before the first."""
    return _status


class ExitForRequeue(SystemExit):
    """Ends the process on purpose, with a status that says what is to follow."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        leaves_with(status)

    @classmethod
    def finished(cls) -> ExitForRequeue:
        """Nothing is left to do."""
        return cls(0)

    @classmethod
    def must_not_run_again(cls) -> ExitForRequeue:
        """A requeue would not help."""
        return cls(MUST_NOT_RUN_AGAIN)
