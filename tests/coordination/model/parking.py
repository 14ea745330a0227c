"""Ranks that are held before the same collectives: the real state of the coordinator, and around it
gates, training threads and channels whose moves may come in any order.

The collectives of a program are on groups that may cross. A thread passes the gate and is counted
in two steps; between them nobody can tell that it is on its way. It blocks in a collective until
all members have issued theirs, or, with an asynchronous one, goes on.

One thing is taken for granted, and without it no number of rounds would do: a thread that can move
does move between two reports of its rank. A round takes as long as messages and sleeps of a
millisecond, and from the gate to being counted is a few microseconds.

Not in the state: reports on their way to the coordinator. It acts on the last one only, so that a
    late
report is no different from late numbers; one that comes after its pause is over is in the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from coordination.model.coordinators import Coordinators
from coordination.model.parked import Groups, Programs, Rank, State, put, send

Words = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Parking:
    """The model.

    Args:
        programs: of each rank, the groups in order.
        pauses, resumes: how many signals there are of each kind, at any ranks; without any, all
            ranks are paused once.
        deaths: how many ranks may die.
        takes_back: what a rank was let through and did not use is taken back with the next round.
        moves_in_time: see above.
    """

    coordinators: Coordinators
    programs: Programs
    groups: Groups
    pauses: int = 0
    resumes: int = 0
    deaths: int = 0
    takes_back: bool = True
    moves_in_time: bool = True

    def starts(self) -> Iterator[State]:
        """All ranks have joined and train; a pause is on its way to all.

        That it comes at any moment is that a rank hears of it at any moment, and that the gate of a
        rank that is signalled closes first is that this one hears of it first.
        """
        coordinator = self.coordinators.new
        for rank in range(len(self.programs)):
            coordinator, _ = self.coordinators.after(coordinator, ("join", rank))
        ranks = tuple(Rank() for _ in self.programs)
        state = State(ranks, coordinator, self.pauses, self.resumes, self.deaths)
        yield state if self.pauses else self._coordinator(send(state, 0, "pause"), 0)

    def weather(self, state: State) -> Iterator[tuple[Words, State]]:
        """A rank is paused, or resumed, or dies."""
        for number, rank in enumerate(state.ranks):
            if rank.dead:
                continue
            if state.deaths:
                dead = Rank(issued=rank.issued, dead=True, up=(*rank.up, ("gone",)))
                yield ("death of", number), put(state, number, dead, deaths=state.deaths - 1)
            if state.pauses and not rank.own:
                paused = put(state, number, rank._replace(own=True), pauses=state.pauses - 1)
                yield ("pause of", number), send(paused, number, "pause")
            if state.resumes and rank.own:
                resumed = put(state, number, rank._replace(own=False), resumes=state.resumes - 1)
                yield ("resume of", number), send(resumed, number, "resume")

    def steps(self, state: State) -> Iterator[tuple[Words, State]]:
        """Each thread's next, and the coordinator's."""
        at_once = None if self.pauses or self.deaths else self._at_once(state)
        if at_once is not None:
            yield at_once
            return
        for number, rank in enumerate(state.ranks):
            if rank.up:
                yield (
                    ("coordinator reads of", number, *rank.up[0]),
                    self._coordinator(state, number),
                )
            if rank.dead:
                continue
            if rank.passing:
                counted = rank._replace(passing=False, issued=rank.issued + 1, owing=False)
                yield ("rank", number, "is counted"), put(state, number, counted)
            elif self._may_pass(state, number):
                used = rank.allowance - (1 if rank.own or rank.peers else 0)
                passing = rank._replace(passing=True, allowance=used, owing=False)
                yield ("rank", number, "passes the gate"), put(state, number, passing)
            if rank.down:
                heard = self._heard(rank)
                yield ("rank", number, "hears", *rank.down[0]), put(state, number, heard)
            if rank.due and not (rank.owing and self._can_move(state, number)):
                yield ("rank", number, "reports"), self._report(state, number)

    def _at_once(self, state: State) -> tuple[Words, State] | None:
        """A step whose moment makes no difference, so that no other is looked at.

        Nobody else sees that a rank hears ``count`` with no allowance to take back, or is asked who
        is in a group, for which the coordinator waits and does nothing else. The report of a
        rank that is held without an allowance is the same until it has reported; and what the
        coordinator does at the last report of a round can take as long on its way back.
        """
        for number, rank in enumerate(state.ranks):
            if rank.down and rank.down[0][0] == "describe":
                words = ("rank", number, "says who is in a group")
                return words, self._coordinator(put(state, number, self._heard(rank)), number)
            if not rank.peers or rank.allowance:
                continue
            if rank.down and rank.down[0][0] == "count":
                return ("rank", number, "hears count"), put(state, number, self._heard(rank))
            if rank.due and not rank.passing:
                return ("rank", number, "reports"), self._report(state, number)
        return None

    # --- a rank
    # --------------------------------------------------------------------------------------------

    def _can_move(self, state: State, number: int) -> bool:
        return state.ranks[number].passing or self._may_pass(state, number)

    def _may_pass(self, state: State, number: int) -> bool:
        rank = state.ranks[number]
        program = self.programs[number]
        is_open = not (rank.own or rank.peers) or rank.allowance > 0
        if not is_open or rank.issued == len(program):
            return False
        if rank.issued == 0 or program[rank.issued - 1].isupper():
            return True
        mine = self._issued(state, number)
        return all(
            self._issued(state, other)[key] >= mine[key]
            for key, members in self.groups.items()
            if number in members
            for other in members
        )

    @cached_property
    def _numbers(self) -> list[list[dict[str, int]]]:
        """By rank and what it has issued: how many of them on each of its groups."""
        return [
            [
                {
                    key: program[:issued].lower().count(key)
                    for key, members in self.groups.items()
                    if rank in members
                }
                for issued in range(len(program) + 1)
            ]
            for rank, program in enumerate(map("".join, self.programs))
        ]

    def _issued(self, state: State, number: int) -> dict[str, int]:
        return self._numbers[number][state.ranks[number].issued]

    def _heard(self, rank: Rank) -> Rank:
        (say, pause, n), *rest = rank.down
        rank = rank._replace(down=tuple(rest))
        if say == "describe":
            told = tuple((key, self.groups[key]) for key in n)
            return rank._replace(up=(*rank.up, ("members", told)))
        if say == "release":
            return rank._replace(peers=False, allowance=0, due=0, owing=False, reported=-1)
        if say == "all_parked":
            return rank._replace(due=0)
        if say == "hold":
            rank = rank._replace(peers=True, allowance=0, reported=-1)
        left = 0 if self.takes_back and say != "let_through" else rank.allowance
        return rank._replace(allowance=max(left, n), due=pause)

    def _report(self, state: State, number: int) -> State:
        rank = state.ranks[number]
        is_new = rank.issued != rank.reported
        groups = tuple(self._issued(state, number).items()) if is_new else None
        after = rank._replace(
            due=0,
            reported=rank.issued,
            owing=self.moves_in_time and self._can_move(state, number),
        )
        told = send(put(state, number, after), number, "counts", rank.due, groups, rank.allowance)
        return told if self.pauses or self.deaths else self._coordinator(told, number)

    # --- the coordinator
    # --------------------------------------------------------------------------------------------

    def _coordinator(self, state: State, number: int) -> State:
        message, *rest = state.ranks[number].up
        event = ("gone", number) if message[0] == "gone" else ("handle", number, *message)
        coordinator, outbox = self.coordinators.after(state.coordinator, event)
        ranks = list(state.ranks)
        ranks[number] = ranks[number]._replace(up=tuple(rest))
        for to, message in outbox:
            if not ranks[to].dead:
                ranks[to] = ranks[to]._replace(down=(*ranks[to].down, message))
        said = {message[0] for _, message in outbox}
        told = "all_parked" in said or (state.told and "release" not in said)
        return state._replace(ranks=tuple(ranks), coordinator=coordinator, told=told)

    # --- what must be so
    # --------------------------------------------------------------------------------------------

    def fault(self, state: State) -> str | None:
        """Told that all are parked, and they are not."""
        if not state.told:
            return None
        on_their_way = [number for number, rank in enumerate(state.ranks) if rank.passing]
        if on_their_way:
            return f"all parked, and ranks {on_their_way} begin a collective"
        for key, members in self.groups.items():
            alive = [number for number in members if not state.ranks[number].dead]
            numbers = [self._issued(state, number)[key] for number in alive]
            if len(set(numbers)) > 1:
                return f"all parked with a collective of {key} in flight: {numbers}"
        return None

    def end_fault(self, state: State) -> str | None:
        """Neither all parked nor all done."""
        if state.told:
            return None
        if self.coordinators[state.coordinator]._pause._active:
            return "the pause never comes about"
        for number, rank in enumerate(state.ranks):
            if rank.peers:
                return f"rank {number} was not released"
        if any(rank.own or rank.dead for rank in state.ranks):
            return None  # held, or in a collective that will never be complete
        if any(rank.issued < len(self.programs[number]) for number, rank in enumerate(state.ranks)):
            return "a rank waits for ever"
        return None
