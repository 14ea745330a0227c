"""The members of an elastic run: who trains, who could, and who has to go. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hydroslurm.elastic.liveness import Liveness
from hydroslurm.elastic.roster import Action, MemberState, Rank, Record, Send, Size


class Members:
    """Those that are connected, and what is to be sent to them and recorded of them."""

    def __init__(self, size: Size, *, current: Iterable[tuple[str, int]], now_s: float) -> None:
        self.size = size
        self.members: dict[str, MemberState] = {}
        self.current = ()
        self._orders = 0
        self._liveness = Liveness()
        self._ready: set[str] = set()  # members that could be taken in
        self._may_leave = False  # False: nobody does
        self._absent: set[Rank] = set()
        self._actions: list[Action] = []
        for name, local_size in current:
            member = self._add(name, "", local_size, now_s)
            member.ready = set(range(local_size))
            self._absent |= set(member.ranks)
            self.current += (name,)

    @property
    def current(self) -> tuple[str, ...]:
        return self._current

    @current.setter
    def current(self, names: tuple[str, ...]) -> None:
        # each of 10,000 members asks whether it trains, several times in one change
        self._current, self._training = names, frozenset(names)
        self._rank_count: int | None = None

    def _add(self, name: str, node: str, local_size: int, now_s: float) -> MemberState:
        self._orders += 1
        member = MemberState(name, node, local_size, self._orders, now_s)
        self.members[name] = member
        return member

    def _present_ranks(self) -> list[Rank]:
        """Of the generation, in order; those that a new coordinator still waits for included."""
        return [
            rank
            for name in self.current
            if name in self.members
            for rank in self.members[name].ranks
        ]

    def _count_ranks(self) -> int:
        """Of the generation; members only go together with ``current``."""
        if self._rank_count is None:
            sizes = (self.members[name].local_size for name in self.current if name in self.members)
            self._rank_count = sum(sizes)
        return self._rank_count

    def _leavers(self) -> list[MemberState]:
        if not self._may_leave:
            return []
        found = [member for member in self.members.values() if member.leaving]
        self._may_leave = bool(found)
        return found

    def _mark_surplus(self) -> None:
        """More train than are wanted: the newest go."""
        if len(self.current) <= self.size.wanted:
            return
        staying = [name for name in self.current if not self.members[name].leaving]
        for name in reversed(staying[self.size.wanted :]):
            self.members[name].leaving = f"{self.size.wanted} members are wanted"
            self._may_leave = True

    def _newcomers(self) -> list[MemberState]:
        """Who can be taken in now, in the order in which they came."""
        staying = sum(not self.members[name].leaving for name in self.current)
        ready = [self.members[name] for name in self._ready if not self.members[name].leaving]
        ready.sort(key=lambda member: member.order)
        return ready[: max(0, self.size.wanted - staying)]

    def _depart(self, member: MemberState) -> None:
        """Send a member away; nothing more is expected of it."""
        for rank in member.ranks:
            if rank[1] in member.present:
                self._send(rank, "depart", reason=member.leaving, failed=False)
        self._record("left", member=member.id, node=member.node, reason=member.leaving)
        self._drop(member)

    def _drop(self, member: MemberState) -> None:
        """It is no member any more."""
        for rank in member.ranks:
            self._liveness.forget(rank)
        self.members.pop(member.id, None)
        self._ready.discard(member.id)
        self._absent -= set(member.ranks)

    def _send(self, rank: Rank, kind: str, /, **fields: Any) -> None:
        member = self.members.get(rank[0])
        if member is None or rank[1] in member.present:
            self._actions.append(Send(rank, {"type": kind, **fields}))

    def _record(self, kind: str, **data: Any) -> None:
        self._actions.append(Record(kind, data))
