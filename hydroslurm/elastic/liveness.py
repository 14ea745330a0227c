"""When each rank was last heard, and whether the others of its step wait for it. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hydroslurm.elastic.roster import Awaited, Rank


class _Progress(NamedTuple):
    """As :meth:`Liveness.progress` is told it."""

    collectives: int | None = None
    meeting_s: float = 0.0
    ended: bool = False


class Liveness:
    """Of all ranks that are connected."""

    def __init__(self) -> None:
        self._heard_s: OrderedDict[Rank, float] = OrderedDict()  # the most silent first
        self._doing: dict[Rank, tuple[int, bool, float]] = {}
        self._progress: dict[Rank, _Progress] = {}

    def heard(self, rank: Rank, now_s: float) -> None:
        """The rank has said something."""
        self._heard_s[rank] = now_s
        self._heard_s.move_to_end(rank)

    def restart(self, now_s: float) -> None:
        """Whoever looks was away itself: everybody has just been heard, and has just begun."""
        self._heard_s = OrderedDict.fromkeys(self._heard_s, now_s)
        self._doing = {rank: (*one[:2], now_s) for rank, one in self._doing.items()}

    def beat(self, rank: Rank, step: int, now_s: float, *, waits: bool) -> None:
        """What the rank is at. ``waits``: it has done its part of the step, or is paused."""
        before = self._doing.get(rank)
        if before is None or before[:2] != (step, waits):
            self._doing[rank] = (step, waits, now_s)

    def progress(
        self, rank: Rank, collectives: int | None, *, meeting_s: float, ended: bool
    ) -> None:
        """What the processes of an agent have come to.

        Args:
            collectives: so many they have issued; None: they do not tell.
            meeting_s: one of them is in ``init_process_group``, which fails after so long; or 0.
            ended: one of them has trained to the end.
        """
        told = _Progress(collectives, meeting_s, ended)
        if told == _Progress():
            self._progress.pop(rank, None)
        else:
            self._progress[rank] = told

    def begin_generation(self) -> None:
        """Processes that are new count anew, and nobody has waited in a step of it yet."""
        self._doing.clear()
        self._progress.clear()

    @property
    def knows_progress(self) -> bool:
        """Whether any agent has said what its processes have come to."""
        return bool(self._progress)

    def awaited(self, ranks: Iterable[Rank]) -> Iterator[tuple[Rank, Awaited]]:
        """Those of a generation whose processes are waited for, and by what."""
        all_told = self._progress.values()
        furthest = max((one.collectives or 0 for one in all_told), default=0)
        meeting_s = max((one.meeting_s for one in all_told), default=0.0)
        some_ended = any(one.ended for one in all_told)
        for rank in ranks:
            own = self._progress.get(rank, _Progress())
            if some_ended:  # a collective that they have issued is complete
                found = Awaited(ended=not own.ended)
            elif own.collectives is not None:
                found = Awaited(collectives=furthest if own.collectives < furthest else 0)
            else:
                found = Awaited(meeting_s=0.0 if own.meeting_s else meeting_s)
            if found != Awaited():
                yield rank, found

    def forget(self, rank: Rank) -> None:
        """Nothing more is expected of the rank."""
        self._heard_s.pop(rank, None)
        self._doing.pop(rank, None)
        self._progress.pop(rank, None)

    def most_silent(self) -> tuple[Rank, float] | None:
        """The rank that was heard least recently, and when."""
        return next(iter(self._heard_s.items()), None)

    def newest_s(self) -> float:
        """When anybody was heard last; never, without ranks."""
        return next(reversed(self._heard_s.values()), -math.inf)

    def stuck(self, ranks: Iterable[Rank], now_s: float, *, after_s: float) -> list[Rank]:
        """Those of a generation for which some others of their step have waited for too long."""
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
