"""One pause of all ranks, as the hub sees it: held, counted, let through, until nobody is behind.

A rank that is held before an all-reduce leaves its peers inside one, and a peer that is inside one
when SIGSTOP comes dies of its time-out after SIGCONT. So each held rank says how many collectives
it has issued on each process group, and the ranks that are behind are let through until all have
issued the same. That needs rounds: on its way to a collective of one group a rank may pass some of
another group, on which the others are behind then. Numbers rise only, so that it ends where the
program does not hang by itself.

Equal numbers are asked for twice: a thread may have passed the gate and not be counted yet. That
is enough because a rank reports only when its threads are held or have been asleep for a while, so
that one that has passed is counted before the next report; and because a round in which a rank may
still use an allowance does not count. The model in tests/runtime/model finds the wrong end without
either.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Letters = list[tuple[int, dict[str, Any]]]

MAX_ROUNDS = 400
"""Then it is told as it is, with collectives in flight: the suspend grace is over long before."""
LONGEST_WAIT_MS = 50
"""Between two rounds that brought nothing new: a rank may be waiting for its data."""
SETTLING_ROUNDS = 100
"""Rounds in which the numbers are equal, and what was issued is waited for to complete."""
INEXACT_ROUNDS = 3
"""Rounds with torch's quick numbers. On gloo they count sends and receives too, which differ
between ranks for good; from then on these are taken out, which costs more."""


class Pausing:
    """The pause in force, if any.

    Attributes:
        wanting: ranks with a cause of their own: a signal, or the program.
    """

    def __init__(self) -> None:
        self.wanting: set[int] = set()
        self._active = False
        self._number = 0
        self._round = 0
        self._equal = 0
        self._stalled = 0
        self._counts: dict[int, Mapping[str, Any]] = {}
        self._before: dict[int, Any] = {}
        self._told = False

    def pause(self, rank: int, present: Collection[int]) -> Letters:
        """A rank is paused: hold all."""
        self.wanting.add(rank)
        if self._active:
            return []
        self._active, self._told = True, False
        self._number += 1
        self._round, self._equal = 1, 0
        self._counts = {}
        return self._to(present, self._letter("hold"))

    def resume(self, rank: int, present: Collection[int]) -> Letters:
        """A rank has no cause of its own any more; the last one lets all go."""
        self.wanting.discard(rank)
        return [] if self.wanting else self.abandon(present)

    def abandon(self, present: Collection[int]) -> Letters:
        """Let all go: somebody wants to stop."""
        self.wanting.clear()
        if not self._active:
            return []
        self._active = False
        return self._to(present, self._letter("release"))

    def without(self, rank: int, present: Collection[int]) -> Letters:
        """A rank is gone; nobody waits for it any more."""
        self._counts.pop(rank, None)
        letters = self.resume(rank, present)
        return letters or self._judge(present)

    def catch_up(self, rank: int, present: Collection[int]) -> Letters:
        """A rank joins while the others are paused."""
        if not self._active:
            return []
        self._next_round()
        self._equal, self._told = 0, False
        others = [other for other in present if other != rank]
        return [*self._to(others, self._letter("count")), (rank, self._letter("hold"))]

    def counts(self, rank: int, message: Mapping[str, Any], present: Collection[int]) -> Letters:
        """What a held rank has issued: ``groups``, key -> [ranks, issued]; what of that is
        ``in_flight``; and its ``allowance``, collectives that it may still issue."""
        if not self._active or (message["pause"], message["round"]) != (self._number, self._round):
            return []
        self._counts[rank] = message
        return self._judge(present)

    def _judge(self, present: Collection[int]) -> Letters:
        if not self._active or self._told or not set(present) <= self._counts.keys():
            return []
        reports = {rank: self._counts[rank]["groups"] for rank in present}
        self._stalled = self._stalled + 1 if reports == self._before else 0
        self._before = reports
        behind = behind_by(reports)
        if any(behind.values()) and self._round < MAX_ROUNDS:
            self._equal = 0
            self._next_round()
            return [(rank, self._onward(behind[rank])) for rank in sorted(present)]
        if any(self._counts[rank].get("allowance") for rank in present):
            self._equal = 0
            self._next_round()
            return self._to(present, self._letter())
        self._equal += 1
        in_flight = sum(self._counts[rank].get("in_flight") or 0 for rank in present)
        settled = self._equal >= 2 and (in_flight == 0 or self._equal >= SETTLING_ROUNDS)
        if settled or self._round >= MAX_ROUNDS:
            return self._tell(present, in_flight=in_flight, behind=sum(behind.values()))
        self._next_round()
        return self._to(present, self._letter())

    def _onward(self, behind: int) -> dict[str, Any]:
        """Some operators count twice in torch's numbers (``reduce_scatter`` of a list). Ranks that
        were always let through by the whole difference could overtake each other for ever."""
        if not behind:
            return self._letter()
        whole = self._round <= INEXACT_ROUNDS
        return self._letter("pass", n=behind if whole else (behind + 1) // 2)

    def _tell(self, present: Collection[int], *, in_flight: int, behind: int) -> Letters:
        self._told = True
        told = self._letter("all_parked", in_flight=in_flight + behind, rounds=self._round)
        return self._to(present, told)

    def _next_round(self) -> None:
        self._round += 1
        self._counts = {}

    def _letter(self, say: str = "count", **more: Any) -> dict[str, Any]:
        exact = self._round > INEXACT_ROUNDS
        return {
            "say": say,
            "pause": self._number,
            "round": self._round,
            "exact": exact,
            "wait_ms": min(LONGEST_WAIT_MS, 1 << min(self._stalled, 10)),
            "of_ranks": sorted(self.wanting),
            **more,
        }

    def _to(self, ranks: Collection[int], letter: dict[str, Any]) -> Letters:
        return [(rank, letter) for rank in sorted(ranks)]


def behind_by(reports: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    """How many collectives each rank has issued less than the foremost members of its groups.

    Args:
        reports: rank -> key of a group -> [its ranks, issued]. A member that does not name a group
            has not made it yet.
    """
    foremost: dict[str, int] = {}
    members: dict[str, set[int]] = {}
    for groups in reports.values():
        for key, (ranks, issued) in groups.items():
            foremost[key] = max(foremost.get(key, 0), int(issued))
            members.setdefault(key, set()).update(map(int, ranks))
    behind = dict.fromkeys(reports, 0)
    for key, most in foremost.items():
        for rank in members[key] & reports.keys():
            mine = reports[rank].get(key)
            behind[rank] += most - (int(mine[1]) if mine else 0)
    return behind
