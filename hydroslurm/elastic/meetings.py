"""Generations that could not meet: when it is tried again, without whom, and when no more. Pure.

A rank whose own part of a change fails (weights that do not fit, no memory) ends with its error,
and is charged with it. What is counted here is told by ranks that live: the others could not be
reached, or sent what cannot be used. Mostly somebody has died, and the next word is of that; then
it counts for nothing. An error that comes back has a cause that stays, and would come back always.
Who has only lost the connection to another is not the cause while a third one says something else.
"""

from __future__ import annotations

from collections.abc import Sequence

WAITS_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Before it is tried again, from the first failure on. A death needs no wait."""
BLAME_AFTER = 3
GIVE_UP_AFTER = len(WAITS_S) + 1


class FailedMeetings:
    """Failures of the generations that were tried since the last one that has met.

    Attributes:
        failures: the member that was first to tell of each, and its error; rather one that has more
            to tell than that it lost another.
    """

    def __init__(self) -> None:
        self.failures: list[tuple[str, str]] = []
        self._due_s = 0.0
        self._lost_peer = False

    def note(self, member: str, error: str, now_s: float, *, lost_peer: bool = False) -> None:
        """One more. ``member``: the first that told."""
        self.failures.append((member, error or "no reason was given"))
        self._lost_peer = lost_peer
        self._due_s = now_s + WAITS_S[min(len(self.failures), len(WAITS_S)) - 1]

    def explain(self, member: str, error: str, *, lost_peer: bool) -> bool:
        """Another member tells of the newest failure; returns whether that says more than was known
        of it."""
        says_more = bool(self.failures) and self._lost_peer and not lost_peer
        if says_more:
            self.failures[-1], self._lost_peer = (member, error or "no reason was given"), False
        return says_more

    def forget(self) -> None:
        """A generation has met, or somebody is gone who may have been the cause."""
        self.failures.clear()
        self._due_s = 0.0

    @property
    def due_s(self) -> float:
        """When it may be tried again."""
        return self._due_s

    @property
    def are_too_many(self) -> bool:
        """It is tried no more."""
        return len(self.failures) >= GIVE_UP_AFTER

    @property
    def leave_newcomers_out(self) -> bool:
        """The others are to show that they can meet alone."""
        return len(self.failures) >= BLAME_AFTER

    def blamed(self, together: Sequence[str], new: Sequence[str]) -> list[str]:
        """Who is to go: the new ones, for the others have met before; if there are none, or all
        are, the one that has told of every failure. Never all of them."""
        if 0 < len(new) < len(together):
            return list(new)
        told = {member for member, _ in self.failures}
        return list(told) if len(told) == 1 and told < set(together) else []

    def __str__(self) -> str:
        member, error = self.failures[-1]
        return (
            f"{len(self.failures)} generations in a row could not meet, the last: {member}: {error}"
        )
