"""When each rank was last heard, and whether the others of its step wait for it. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

from hydroslurm.elastic.roster import Rank


class Liveness:
    """Of all ranks that are connected."""

    def __init__(self) -> None:
        self._heard_s: OrderedDict[Rank, float] = OrderedDict()  # the most silent first
        self._doing: dict[Rank, tuple[int, bool, float]] = {}
        self._issued: dict[Rank, int] = {}

    def heard(self, rank: Rank, now_s: float) -> None:
        """The rank has said something."""
        self._heard_s[rank] = now_s
        self._heard_s.move_to_end(rank)

    def beat(self, rank: Rank, step: int, now_s: float, *, waits: bool) -> None:
        """What the rank is at. ``waits``: it has done its part of the step, or is paused."""
        before = self._doing.get(rank)
        if before is None or before[:2] != (step, waits):
            self._doing[rank] = (step, waits, now_s)

    def issued(self, rank: Rank, collectives: int | None) -> None:
        """How many collectives the processes of an agent have issued; None: they do not tell."""
        if collectives is None:
            self._issued.pop(rank, None)
        else:
            self._issued[rank] = collectives

    def begin_generation(self) -> None:
        """Processes that are new count anew."""
        self._issued.clear()

    def behind(self) -> tuple[list[Rank], int]:
        """Those whose processes have issued fewer collectives than others have, and how many the
        furthest has."""
        furthest = max(self._issued.values(), default=0)
        return [rank for rank, issued in self._issued.items() if issued < furthest], furthest

    def forget(self, rank: Rank) -> None:
        """Nothing more is expected of the rank."""
        self._heard_s.pop(rank, None)
        self._doing.pop(rank, None)
        self._issued.pop(rank, None)

    def most_silent(self) -> tuple[Rank, float] | None:
        """The rank that was heard least recently, and when."""
        return next(iter(self._heard_s.items()), None)

    def silent_from_s(self) -> float:
        """When that was; never, without ranks."""
        return next(iter(self._heard_s.values()), math.inf)

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
