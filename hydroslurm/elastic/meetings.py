"""Generations that failed to meet: when to retry, without whom, and when to give up. Pure.

A rank whose own part of a change fails (mismatched weights, no memory) exits with its error and is
blamed for it. Counted here are failures that live ranks report: the others were unreachable, or
sent something unusable. Usually a rank has died; the coordinator soon learns that, and the failure
no longer counts. An error that returns has a lasting cause. A rank that only lost its connection to
another is not the cause while a third rank reports something else.
"""

from __future__ import annotations

from collections.abc import Sequence

WAITS_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Delays before each retry, from the first failure on. A death needs none."""
BLAME_AFTER = 3
GIVE_UP_AFTER = len(WAITS_S) + 1


class FailedMeetings:
    """Failed attempts to form a generation since the last that met.

    Attributes:
        failures: first member to report each, and its error; a member that reports more than a
            lost peer takes precedence.
    """

    def __init__(self) -> None:
        self.failures: list[tuple[str, str]] = []
        self._due_s = 0.0
        self._lost_peer = False

    def note(self, member: str, error: str, now_s: float, *, lost_peer: bool = False) -> None:
        """Add a failure. ``member``: the first to report it."""
        self.failures.append((member, error or "no reason was given"))
        self._lost_peer = lost_peer
        self._due_s = now_s + WAITS_S[min(len(self.failures), len(WAITS_S)) - 1]

    def explain(self, member: str, error: str, *, lost_peer: bool) -> bool:
        """Add another member's report of the newest failure; return whether it says more than the
        first."""
        says_more = bool(self.failures) and self._lost_peer and not lost_peer
        if says_more:
            self.failures[-1], self._lost_peer = (member, error or "no reason was given"), False
        return says_more

    def forget(self) -> None:
        """Start over: a generation has met, or the possible cause has gone."""
        self.failures.clear()
        self._due_s = 0.0

    @property
    def due_s(self) -> float:
        """When to retry."""
        return self._due_s

    @property
    def are_too_many(self) -> bool:
        """Whether to give up."""
        return len(self.failures) >= GIVE_UP_AFTER

    @property
    def leave_newcomers_out(self) -> bool:
        """Whether to try without the newcomers, to see if the others can meet."""
        return len(self.failures) >= BLAME_AFTER

    def blamed(self, together: Sequence[str], new: Sequence[str]) -> list[str]:
        """Return the members to remove: the new ones, as the others have met before; if none or all
        are new, a member that reported every failure. Never all of them."""
        if 0 < len(new) < len(together):
            return list(new)
        reporters = {member for member, _ in self.failures}
        return list(reporters) if len(reporters) == 1 and reporters < set(together) else []

    def __str__(self) -> str:
        member, error = self.failures[-1]
        return (
            f"{len(self.failures)} generations in a row could not meet, the last: {member}: {error}"
        )
