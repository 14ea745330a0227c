"""Ranks that stop, or save, at one safe point: the real state of the coordinator and the real
barriers of each rank, and around them what may come in any order.

A rank is a training thread, a thread that hears the coordinator, and two channels, first in first
out. What a thread does under a lock is one step of the model. With ``by_access`` so is each access
without
one: the training thread counts it, and then looks whether a barrier was called; the other
appends the barrier to the list, and then reads the place. Between any two steps anything may happen
elsewhere.

Before a place there may be a collective, which ends for nobody before every rank has come to it.
Its end and the raising of the place are one step, for the first cannot be noticed elsewhere.

A training thread may see its own rank's signal first. It can then do no more than what the other
thread is about to do, call a barrier, so that this is among the interleavings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from coordination.model.coordinators import Coordinators
from coordination.model.members import (
    LIVING,
    RANKS,
    Habits,
    Rank,
    RealBarriers,
    State,
    Words,
    begin,
    is_missed,
    leave,
    put,
    send,
)


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """The model.

    Args:
        collectives: whether there is one before each safe point.
        signals, deaths, saves: how often at most; saves are wanted by rank 0.
        joined: ranks that are connected from the start; the others join at some time.
        by_access: one step is one access to what threads share, and not all that is done under one
            lock, or about it.
        both_at_once: the first save and the first signal are wanted at once, and heard at any
            moment; a part of what there is.
        signalled: ranks that get the signals.
        alike: which rank is the first to die makes no difference.
    """

    coordinators: Coordinators
    collectives: tuple[bool, ...] = (True, True, True)
    signals: int = 0
    deaths: int = 0
    saves: int = 0
    joined: tuple[bool, ...] = (True,) * RANKS
    by_access: bool = False
    both_at_once: bool = False
    signalled: tuple[int, ...] = tuple(range(RANKS))
    alike: bool = True
    habits: Habits = field(default_factory=Habits)

    @cached_property
    def _barriers(self) -> RealBarriers:
        return RealBarriers(self.habits.barriers)

    @property
    def last(self) -> int:
        return len(self.collectives)

    def starts(self) -> Iterator[State]:
        """What is wanted first is wanted at once, and on its way to all. That it is wanted at any
        moment is that each rank hears of it at any moment. A save that is wanted after a stop is
        none, so that a save comes first."""
        coordinator = self.coordinators.new
        for rank, is_here in enumerate(self.joined):
            if is_here:
                coordinator, _ = self.coordinators.after(coordinator, ("join", rank))
        ranks = tuple(Rank(joined=is_here) for is_here in self.joined)
        state = State(ranks, coordinator, self.signals, self.deaths, self.saves)
        if self.saves:
            state = self._want_save(state)
            yield self._signal(state, self.signalled[0]) if self.both_at_once else state
        elif self.signals and all(self.joined):
            yield self._signal(state, 0)
        else:
            yield state

    # --- what may happen to them
    # --------------------------------------------------------------------------------------------

    def weather(self, state: State) -> Iterator[tuple[Words, State]]:
        """Signals, deaths and the clock of the periodic saves.

        The coordinator has the call at once: a call that takes its time is one that is made later,
        for nothing in its rank waits for it.
        """
        is_first = state.deaths == self.deaths
        for number, rank in enumerate(state.ranks):
            if rank.phase not in LIVING:
                continue
            if state.signals and number in self.signalled:
                yield ("signal to rank", number), self._signal(state, number)
            if state.deaths and rank.joined and not (number and is_first and self.alike):
                yield from self._death(state, number, rank)
        if state.saves and state.ranks[0].phase in LIVING:
            yield ("rank 0 wants a save",), self._want_save(state)

    def _signal(self, state: State, number: int) -> State:
        rank = state.ranks[number]
        after = put(state, number, rank._replace(signals=rank.signals + 1))
        after = after._replace(signals=state.signals - 1)
        return (
            self._deliver(after, "handle", number, "call_barrier", "stop") if rank.joined else after
        )

    def _want_save(self, state: State) -> State:
        return self._deliver(
            state._replace(saves=state.saves - 1), "handle", 0, "call_barrier", "save"
        )

    def _death(self, state: State, number: int, rank: Rank) -> Iterator[tuple[Words, State]]:
        after = state._replace(deaths=state.deaths - 1, anybody_died=True)
        dead = Rank("dead", entered=rank.entered, saves=rank.saves)
        arrives = dead._replace(up=(*rank.up, ("gone",)))
        yield ("death of rank", number), put(after, number, arrives)
        if rank.up:  # a connection that is reset may lose what was not read
            words = ("death and loss of what it sent, rank", number)
            yield words, put(after, number, dead._replace(up=(("gone",),)))

    # --- what they do
    # --------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[Words, State]]:
        """Each thread's next, and the coordinator's."""
        for number, rank in enumerate(state.ranks):
            if rank.up:
                yield (
                    ("coordinator reads of", number, *rank.up[0]),
                    self._coordinator(state, number),
                )
            if rank.phase in LIVING:
                for words, after in self._thread(state, rank):
                    yield ("rank", number, words), put(state, number, after)
                for words, after in self._listener(rank):
                    yield ("rank", number, *words), put(state, number, after)

    def _coordinator(self, state: State, number: int) -> State:
        message, *rest = state.ranks[number].up
        after = put(state, number, state.ranks[number]._replace(up=tuple(rest)))
        if message[0] in ("join", "gone"):
            return self._deliver(after, message[0], number)
        return self._deliver(after, "handle", number, *message)

    def _deliver(self, state: State, *event: Any) -> State:
        coordinator, outbox = self.coordinators.after(state.coordinator, event)
        ranks = list(state.ranks)
        for to, message in outbox:
            if ranks[to].phase in LIVING:
                ranks[to] = ranks[to]._replace(down=(*ranks[to].down, message))
        return state._replace(ranks=tuple(ranks), coordinator=coordinator)

    def _listener(self, rank: Rank) -> Iterator[tuple[Words, Rank]]:
        if not rank.joined:
            wants = (("call_barrier", "stop"),) * rank.signals
            yield ("joins",), rank._replace(joined=True, up=(("join",), *wants))
        if rank.calling:
            yield ("proposals",), self._propose(rank)
        elif rank.down:
            message, *rest = rank.down
            after = rank._replace(down=tuple(rest))
            if message[0] != "barrier_called":
                yield ("hears", *message), self._barriers.do(after, *message)
                return
            early = [rank.place] if self.habits.reads_index_early else []
            calling = after._replace(calling=(*message[1:], *early))
            yield ("hears", *message), calling if self.by_access else self._propose(calling)

    def _propose(self, rank: Rank) -> Rank:
        number, kind, *early = rank.calling
        called = self._barriers.do(rank._replace(calling=()), "call", number, kind, *early)
        return send(called, ("propose", number, called.called[-1][2]))

    def _thread(self, state: State, rank: Rank) -> Iterator[tuple[str, Rank]]:
        if rank.phase == "training":
            if rank.place == self.last:
                yield "finishes", leave(rank, "finished")
            elif self.collectives[rank.place]:
                yield "begins a collective", begin(rank)
            else:
                yield "reaches a safe point", self._reach(rank)
        elif rank.phase == "in collective":
            others = [(one.phase, one.entered) for one in state.ranks]
            if all(entered >= rank.entered for _, entered in others):
                yield "reaches a safe point", self._reach(rank)
            elif is_missed(others, rank.entered):
                yield "gets an error of its collective", leave(rank, "broken")
        elif rank.phase == "saving":
            others = [(one.phase, one.saves) for one in state.ranks]
            if all(saves >= rank.saves for _, saves in others) or is_missed(others, rank.saves):
                yield "has saved, or has seen that it cannot", self._go_on(rank)
        elif rank.phase == "raising":
            yield "counts it", self._go_on(rank._replace(place=rank.place + 1))
        elif rank.phase == "arriving":
            after = self._look(rank)
            if after is not None:
                yield "looks", after
        elif not self._has_to_wait(rank):
            yield "waits no longer", self._hold(rank)

    # --- a place
    # --------------------------------------------------------------------------------------------

    def _reach(self, rank: Rank) -> Rank:
        after = rank._replace(place=rank.place + 1, phase="arriving")
        if self.habits.looks_before_counting and not rank.called and not rank.calling:
            return rank._replace(phase="raising")
        return after if self.by_access else self._look(after) or after

    def _look(self, rank: Rank) -> Rank | None:
        """The list is looked at without the lock, and with something on it under the lock; None
        while the other thread has that."""
        is_locked = bool(rank.calling) and not self.habits.reads_index_early
        if is_locked:
            return None
        if not rank.called:
            return self._go_on(rank)
        if self._has_to_wait(rank):
            return rank._replace(phase="waiting")
        return self._hold(rank)

    def _has_to_wait(self, rank: Rank) -> bool:
        if rank.calling and not self.habits.reads_index_early:
            return True
        return self.habits.waits and bool(self._barriers.do(rank, "has_to_wait"))

    def _hold(self, rank: Rank) -> Rank:
        """Hold the barriers of this place."""
        if not self.habits.waits:
            proposed = any(one[1] == "stop" and one[2] == rank.place for one in rank.called)
            return leave(rank, "stopped") if proposed else self._go_on(rank)
        called, held = self._barriers.do(rank, "barrier_agreed")
        if held is None:
            return leave(rank, "failed")
        if any(place != rank.place for _, place in held):
            return rank._replace(phase="too late")
        kinds = {kind for kind, _ in held}
        after = rank._replace(called=called, stops="stop" in kinds)
        if "save" not in kinds:
            return self._go_on(after)
        late = self.habits.counts_after_saving
        return after._replace(
            phase="saving", saves=rank.saves + 1, place=rank.place - 1 if late else rank.place
        )

    def _go_on(self, rank: Rank) -> Rank:
        if self.habits.counts_after_saving and rank.phase == "saving":
            rank = rank._replace(place=rank.place + 1)
        if rank.stops or (self.habits.heeds_own_signal_alone and rank.signals):
            return leave(rank, "stopped")
        if not self.deaths and rank.place < self.last and self.collectives[rank.place]:
            # to be late for a collective is then no different from being late for its end
            return begin(rank)
        return rank._replace(phase="training")

    # --- what must be so
    # --------------------------------------------------------------------------------------------

    def fault(self, state: State) -> str | None:
        """Ranks that are not of one mind."""
        living = [rank for rank in state.ranks if rank.phase != "dead"]
        said = {rank.phase for rank in living if rank.phase not in LIVING}
        if "too late" in said:
            return "a rank has passed the common safe point"
        if "broken" in said and not state.anybody_died:
            return "a rank left its peers in a collective"
        stopped = {(rank.place, rank.entered) for rank in living if rank.phase == "stopped"}
        if len(stopped) > 1:
            return f"stopped at different safe points: {sorted(stopped)}"
        said -= {"broken"}
        if state.anybody_died:
            said -= {"finished"}  # it had nothing left to do with the one that died
        return f"no agreement: {sorted(said)}" if len(said) > 1 else None

    def end_fault(self, state: State) -> str | None:
        """Ranks that wait for ever, or have missed a save."""
        for number, rank in enumerate(state.ranks):
            if rank.phase in LIVING:
                return f"rank {number} waits for ever, {rank.phase}"
        if len({rank.saves for rank in state.ranks}) > 1 and not state.anybody_died:
            return "not all ranks have saved"
        return None
