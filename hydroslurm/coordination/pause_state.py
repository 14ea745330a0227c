"""One pause of all ranks, as the coordinator sees it. Pure.

A rank that is held before an all-reduce leaves its peers inside it, and a peer that is inside one
when SIGSTOP arrives dies of its time-out after SIGCONT. So each held rank reports how many
collectives it has issued on each process group, and the ranks that are behind are let through until
all have issued the same number. This takes rounds: on its way to a collective of one group a rank
may pass some of another group, on which the others are behind then. Counts only rise, so it
terminates unless the program itself hangs.

Equal counts are asked for twice, because a thread may have passed the gate and not be counted yet.
Twice is enough: a rank reports only when its threads are held or have been asleep for a while, so a
thread that has passed is counted before the next report; and a round in which a rank may still use
an allowance does not count. Without either of these the model in tests/coordination/model finds a
wrong end.

A rank names its groups in its first report, and again when a count has changed; otherwise it says
that it has nothing new, in the same bytes as every other rank. It tells who the members are only
when it is asked: one rank per group is, once. So a report is small, and a round costs what the
reports do.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

from hydroslurm.coordination.messages import Message, Outbox, Runs

MAX_ROUNDS = 400
"""Give up then, and report collectives in flight: the suspend grace is over long before."""
LONGEST_WAIT_MS = 50
"""Longest pause between two rounds without news: a rank may be waiting for its data."""
SETTLING_ROUNDS = 100
"""How many rounds with equal counts wait for issued collectives to complete."""
INEXACT_ROUNDS = 3
"""Rounds with torch's quick counts. On gloo these include sends and receives, which differ between
ranks permanently; later rounds leave them out, which costs more."""

MAX_PAUSING = 16
"""Most ranks that are named as pausing: in a suspended job all of them are."""


class PauseState:
    """The pause in force, if any.

    Attributes:
        paused_by: ranks with a cause of their own: a signal, or the program.
    """

    def __init__(self) -> None:
        self.paused_by: set[int] = set()
        self._active = False
        self._number = 0
        self._round = 0
        self._equal_rounds = 0
        self._stalled_rounds = 0
        self._counts: dict[int, Mapping[str, Any]] = {}
        self._groups: dict[int, Mapping[str, int]] = {}
        self._last_counts: dict[int, Mapping[str, int]] = {}
        self._behind: dict[int, int] = {}
        self._all_parked = False
        self._members: dict[str, Runs] = {}
        self._asked: dict[int, list[str]] = {}

    def pause(self, rank: int, present: Collection[int]) -> Outbox:
        """A rank is paused: hold all."""
        self.paused_by.add(rank)
        if self._active:
            return []
        self._active, self._all_parked = True, False
        self._number += 1
        self._round, self._equal_rounds = 1, 0
        self._counts, self._groups = {}, {}
        return self._to(present, self._message("hold"))

    def resume(self, rank: int, present: Collection[int]) -> Outbox:
        """A rank's last own cause is gone; the last such rank releases all."""
        self.paused_by.discard(rank)
        return [] if self.paused_by else self.abandon(present)

    def abandon(self, present: Collection[int]) -> Outbox:
        """Release all ranks, for example because one has to stop."""
        self.paused_by.clear()
        if not self._active:
            return []
        self._active = False
        return self._to(present, self._message("release"))

    def without(self, rank: int, present: Collection[int]) -> Outbox:
        """A rank is gone; the others do not wait for it."""
        self._counts.pop(rank, None)
        self._groups.pop(rank, None)
        self._asked.pop(rank, None)  # the next one is asked
        return self.resume(rank, present) or self._evaluate(present)

    def catch_up(self, rank: int, present: Collection[int]) -> Outbox:
        """A rank joins while the others are paused."""
        if not self._active:
            return []
        self._next_round()
        self._equal_rounds, self._all_parked = 0, False
        others = [other for other in present if other != rank]
        return [*self._to(others, self._message("count")), (rank, self._message("hold"))]

    def counts(self, rank: int, message: Mapping[str, Any], present: Collection[int]) -> Outbox:
        """Take the report of a held rank: ``groups``, key -> issued, or None for what it has
        reported before in this pause; how many of those are ``in_flight``, None where it cannot
        know; and its ``allowance``, collectives that it may still issue."""
        if not self._active or message["pause"] != self._number:
            return []
        groups = message["groups"]
        if groups is not None:
            self._groups[rank] = groups  # also of a round that is over: the rank counts on it
        if message["round"] != self._round:
            return []
        if rank not in self._groups:  # it reported to another coordinator: start over with it
            return [(rank, self._message("hold"))]
        self._counts[rank] = message
        return self._evaluate(present)

    def members(self, rank: int, groups: Mapping[str, Runs], present: Collection[int]) -> Outbox:
        """Take the members of groups from a rank that was asked. It may have destroyed one
        meanwhile: nobody can be waited for in such a group."""
        asked = self._asked.pop(rank, None)
        if asked is None:
            return []
        self._members |= {key: groups.get(key, []) for key in asked}
        return self._evaluate(present)

    def _evaluate(self, present: Collection[int]) -> Outbox:
        missing = len(self._counts) < len(present) or self._asked
        if not self._active or self._all_parked or missing:
            return []
        reports = {rank: self._groups[rank] for rank in present}
        if reports == self._last_counts:  # members are known, and who is behind
            self._stalled_rounds += 1
            return self._decide(present)
        if asked := self._ask_for_members(reports):
            return asked
        self._stalled_rounds, self._last_counts = 0, reports
        self._behind = behind_by(reports, self._members)
        return self._decide(present)

    def _ask_for_members(self, reports: Mapping[int, Mapping[str, int]]) -> Outbox:
        """Have the first rank that names an unknown group say who is in it; forget the groups that
        nobody names any more."""
        named: dict[str, int] = {}
        for rank in sorted(reports, reverse=True):
            named |= dict.fromkeys(reports[rank], rank)
        self._members = {key: of for key, of in self._members.items() if key in named}
        for key in sorted(named.keys() - self._members.keys()):
            self._asked.setdefault(named[key], []).append(key)
        return [
            (rank, {"type": "describe", "groups": keys})
            for rank, keys in sorted(self._asked.items())
        ]

    def _decide(self, present: Collection[int]) -> Outbox:
        behind = self._behind
        if any(behind.values()) and self._round < MAX_ROUNDS:
            self._equal_rounds = 0
            self._next_round()
            messages = {n: self._catch_up_message(n) for n in set(behind.values())}
            return [(rank, messages[behind[rank]]) for rank in sorted(present)]
        if any(self._counts[rank].get("allowance") for rank in present):
            self._equal_rounds = 0
            self._next_round()
            return self._to(present, self._message())
        self._equal_rounds += 1
        told = [self._counts[rank].get("in_flight") for rank in present]
        in_flight = sum(one or 0 for one in told) + sum(behind.values())
        settled = self._equal_rounds >= 2 and (
            in_flight == 0 or self._equal_rounds >= SETTLING_ROUNDS
        )
        if settled or self._round >= MAX_ROUNDS:
            return self._announce(present, in_flight=in_flight or (None if None in told else 0))
        self._next_round()
        return self._to(present, self._message())

    def _catch_up_message(self, behind: int) -> Message:
        """Some operators count twice in torch's numbers (``reduce_scatter`` of a list). Ranks that
        were always let through by the whole difference could overtake each other forever."""
        if not behind:
            return self._message()
        whole = self._round <= INEXACT_ROUNDS
        return self._message("let_through", n=behind if whole else (behind + 1) // 2)

    def _announce(self, present: Collection[int], *, in_flight: int | None) -> Outbox:
        self._all_parked = True
        message = self._message("all_parked", in_flight=in_flight, rounds=self._round)
        return self._to(present, message)

    def _next_round(self) -> None:
        self._round += 1
        self._counts = {}

    def _message(self, kind: str = "count", **more: Any) -> Message:
        exact = self._round > INEXACT_ROUNDS
        return {
            "type": kind,
            "pause": self._number,
            "round": self._round,
            "exact": exact,
            "wait_ms": min(LONGEST_WAIT_MS, 1 << min(self._stalled_rounds, 10)),
            "of_ranks": sorted(self.paused_by)[:MAX_PAUSING],
            **more,
        }

    def _to(self, ranks: Collection[int], message: Message) -> Outbox:
        return [(rank, message) for rank in sorted(ranks)]


def behind_by(
    reports: Mapping[int, Mapping[str, int]], members: Mapping[str, Runs]
) -> dict[int, int]:
    """How many collectives each rank has issued fewer than the foremost members of its groups.

    Linear in what it is given, however many ranks a group claims to have. Never negative, whatever
    a rank says of its groups.

    Args:
        reports: rank -> key of a group -> issued. A member that does not name a group has not
            created it yet.
        members: key of each group -> its ranks, some of which may be gone.
    """
    foremost: dict[str, int] = {}
    for groups in reports.values():
        for key, issued in groups.items():
            foremost[key] = max(foremost.get(key, 0), issued)
    # what a member of all these groups should have issued, as differences from rank to rank
    rises = [0] * (max(reports, default=0) + 2)
    for key, most in foremost.items():
        for first, last in members[key]:
            if first < len(rises):
                rises[first] += most
                rises[min(last + 1, len(rises) - 1)] -= most
    due = list(itertools.accumulate(rises))
    return {rank: max(0, due[rank] - sum(groups.values())) for rank, groups in reports.items()}
