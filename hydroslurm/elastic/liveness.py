"""Which ranks an elastic run can go on with: when each was last heard from, whether others in its
step wait for it, and which generations have failed to meet. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hydroslurm.elastic.roster import Awaited, Rank


class _Progress(NamedTuple):
    """Arguments of :meth:`Liveness.progress`."""

    collectives: int | None = None
    meeting_s: float = 0.0
    ended: bool = False


class Liveness:
    """Last signs of life and progress of all connected ranks."""

    def __init__(self) -> None:
        self._heard_s: OrderedDict[Rank, float] = OrderedDict()  # longest silent first
        self._doing: dict[Rank, tuple[int, bool, float]] = {}
        self._progress: dict[Rank, _Progress] = {}

    def heard(self, rank: Rank, now_s: float) -> None:
        """Note that a message came from this rank."""
        self._heard_s[rank] = now_s
        self._heard_s.move_to_end(rank)

    def restart(self, now_s: float) -> None:
        """Reset all clocks after this process itself was stopped, so that nobody looks silent."""
        self._heard_s = OrderedDict.fromkeys(self._heard_s, now_s)
        self._doing = {rank: (*doing[:2], now_s) for rank, doing in self._doing.items()}

    def beat(self, rank: Rank, step: int, now_s: float, *, waits: bool) -> None:
        """Note the rank's step. ``waits``: its part of the step is done, or it is paused."""
        before = self._doing.get(rank)
        if before is None or before[:2] != (step, waits):
            self._doing[rank] = (step, waits, now_s)

    def progress(
        self, rank: Rank, collectives: int | None, *, meeting_s: float, ended: bool
    ) -> None:
        """Note the progress of an agent's processes.

        Args:
            collectives: how many they have issued; None: unknown.
            meeting_s: timeout of ``init_process_group`` while a process is in it, else 0.
            ended: a process has trained to the end.
        """
        progress = _Progress(collectives, meeting_s, ended)
        if progress == _Progress():
            self._progress.pop(rank, None)
        else:
            self._progress[rank] = progress

    def begin_generation(self) -> None:
        """Reset progress: a new generation's processes count from 0, and none waits yet."""
        self._doing.clear()
        self._progress.clear()

    @property
    def knows_progress(self) -> bool:
        """Whether any agent has reported progress."""
        return bool(self._progress)

    def awaited(self, ranks: Iterable[Rank]) -> Iterator[tuple[Rank, Awaited]]:
        """Yield the ranks of a generation that others wait for, and in what."""
        reports = self._progress.values()
        furthest = max((report.collectives or 0 for report in reports), default=0)
        meeting_s = max((report.meeting_s for report in reports), default=0.0)
        some_ended = any(report.ended for report in reports)
        for rank in ranks:
            own = self._progress.get(rank, _Progress())
            if some_ended:  # every collective they issued is complete
                awaited = Awaited(ended=not own.ended)
            elif own.collectives is not None:
                awaited = Awaited(collectives=furthest if own.collectives < furthest else 0)
            else:
                awaited = Awaited(meeting_s=0.0 if own.meeting_s else meeting_s)
            if awaited != Awaited():
                yield rank, awaited

    def forget(self, rank: Rank) -> None:
        """Expect nothing more from this rank."""
        self._heard_s.pop(rank, None)
        self._doing.pop(rank, None)
        self._progress.pop(rank, None)

    def most_silent(self) -> tuple[Rank, float] | None:
        """Return the rank that has been silent longest, and when it was last heard."""
        return next(iter(self._heard_s.items()), None)

    def newest_s(self) -> float:
        """When any rank was last heard; -inf without ranks."""
        return next(reversed(self._heard_s.values()), -math.inf)

    def stuck(self, ranks: Iterable[Rank], now_s: float, *, after_s: float) -> list[Rank]:
        """Return the ranks for which others in their step have waited longer than ``after_s``."""
        known = [rank for rank in ranks if rank in self._doing]
        waiting_s = [
            now_s - since_s for _, waits, since_s in map(self._doing.__getitem__, known) if waits
        ]
        if not waiting_s or max(waiting_s) <= after_s:
            return []
        return [
            rank
            for rank in known
            if not self._doing[rank][1] and now_s - self._doing[rank][2] > after_s
        ]


# --- generations that failed to meet

WAITS_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Delays before each retry, from the first failure on. A death needs none."""
BLAME_AFTER = 3
GIVE_UP_AFTER = len(WAITS_S) + 1


class FailedMeetings:
    """Failed attempts to form a generation since the last that met: when to retry, without whom,
    and when to give up.

    A rank whose own part of a change fails (mismatched weights, no memory) exits with its error and
    is blamed for it. Counted here are failures that live ranks report: the others were unreachable,
    or sent something unusable. Usually a rank has died; the coordinator soon learns that, and the
    failure no longer counts. An error that returns has a lasting cause. A rank that only lost its
    connection to another is not the cause while a third rank reports something else.

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
