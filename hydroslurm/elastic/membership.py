"""Who trains together: the state machine of an elastic run's coordinator. Pure.

Its input is what happened and when; its output is what to send and record. It uses no clock, socket
or file. Events (a message, a lost connection, a passing second) note what is known; what follows
from it is one table, :data:`TRANSITIONS`, over these phases:

    WAITING    no generation trains; members gather
    TRAINING   a generation trains
    CALLING    ask every rank of the generation where it can hold next
    HOLDING    all have answered: they train up to the largest step proposed, and hold there
    BREAKING   a rank is gone in the middle of a step: the others drop that step, and hold
    DECIDING   all hold, or nobody trained: choose what follows, at once
    SAVING     too few would be left: one rank saves before anyone leaves
    FORMING    the new generation meets, and newcomers get the state
    SUSPENDED  all hold, and wait for more members
    TAIL       all have trained to the end, and do what follows the training
    FINISHED   all processes have ended well
    FAILED     the run cannot go on

Two events change the phase themselves: a lost rank or a failed collective breaks a generation that
trains, is called, holds or forms, and the first rank that has trained to the end makes the others
hold. If a process of the tail has not ended well, others repeat the tail.

A change called while all is well loses nothing: all ranks hold after one step. A change forced by a
death repeats at most the current step. If ranks are one step ahead (a death may let a collective
succeed here and fail there), the others get the state from them.

Only the newest generation trains. A rank returning from an older one is refused: what it has
trained since is not part of the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from hydroslurm.elastic.liveness import FailedMeetings, Liveness
from hydroslurm.elastic.roster import (
    CONNECTION_ENDED,
    Action,
    Arrival,
    Change,
    Close,
    MemberState,
    Phase,
    Rank,
    Record,
    Refused,
    Send,
    Size,
    Timing,
)

CUT_OFF_S = 60.0
"""Added to ``silent_s`` while no other rank is heard either: longer than the 40 s after which the
connection of a lost node ends."""
_STATES = {
    Phase.WAITING: "Waiting",
    Phase.TRAINING: "Running",
    Phase.SUSPENDED: "Suspended",
    Phase.TAIL: "Running",
    Phase.FINISHED: "Succeeded",
    Phase.FAILED: "Failed",
}
"""Words for ``describe``; in all other phases the run is "Resizing"."""


class Membership:
    """The members of one run.

    Attributes:
        size: change it only by :meth:`scale`.
        generation: number of the newest one; 0 before the first.
        current: its members, in the order of their ranks; () while none trains.
        finished: the training and what follows it are complete.
        gave_up: why the run cannot go on; "" while it can.
        ranks_each: torch ranks per connected rank; more than 1 only for agents.
        are_agents: the connected ranks are agents, so a formed generation has yet to meet.
    """

    def __init__(
        self,
        size: Size,
        timing: Timing | None = None,
        *,
        generation: int = 0,
        current: Iterable[tuple[str, int]] = (),
        change: int = 0,
        now_s: float = 0.0,
    ) -> None:
        """``generation``, ``current`` (members and their numbers of ranks), ``change``: from an
        earlier coordinator; its ranks have ``return_s`` to reconnect."""
        self.size = size
        self.timing = timing or Timing()
        self.members: dict[str, MemberState] = {}
        self.current = ()
        self.generation = generation
        self.change: Change | None = None
        self.finished = False
        self.gave_up = ""
        self.step = 0
        self.ranks_each = 1
        self.are_agents = False
        self._orders = 0
        self._liveness = Liveness()
        self._ready: set[str] = set()  # members that could join
        self._leaving: set[str] = set()
        self._absent: set[Rank] = set()
        self._absent_until_s = now_s + self.timing.return_s
        self._actions: list[Action] = []
        self._met: frozenset[str] = frozenset()
        self._changes = change
        self._due_s = math.inf  # of the transition that waits
        self._begun: tuple[int, int, float] | None = None
        self._tail: set[Rank] | None = None  # ranks still busy with what follows the training
        self._tail_failed: list[str] = []
        self._failed_meetings = FailedMeetings()
        for name, local_size in current:
            member = self._add(name, "", local_size, now_s)
            member.ready = set(range(local_size))
            self._absent |= set(member.ranks)
            self.current += (name,)

    # --- events
    # --------------------------------------------------------------------------------------------

    def join(
        self,
        rank: Rank,
        *,
        local_size: int,
        node: str,
        generation: int,
        holding: bool,
        now_s: float,
    ) -> list[Action]:
        """A rank has connected. ``generation``: its own, 0 for a newcomer; ``holding``: it was in
        the middle of a change.

        Raises:
            Refused: it may not join.
        """
        name, local = rank
        if self.finished:
            raise Refused("the run has finished")
        if self.gave_up:
            raise Refused(f"the run has failed: {self.gave_up}")
        if not 0 <= local < local_size:
            raise Refused(f"rank {local} of {local_size} on one node does not exist")
        member = self.members.get(name)
        if member is not None and member.local_size != local_size:
            raise Refused(f"{name} has {member.local_size} ranks, and {local_size} are claimed")
        other = next(iter(self.members.values()), None)
        if member is None and other is not None and other.local_size != local_size:
            raise Refused(
                f"{name} has {local_size} ranks, and each member of this run has "
                f"{other.local_size}: their share of a step and their learning rate would not be "
                "the same. Start as many processes on each node"
            )
        if member is not None and local in member.present:
            raise Refused(f"rank {local} of {name} is connected already", again=True)
        if generation and not self._may_return(name, generation, holding):
            raise Refused(
                f"generation {generation} is over, {self.generation} trains: what this rank has "
                "trained since is not part of the run. Started again it may join"
            )
        if not generation and name in self._training:
            if member is not None and rank in self._absent:  # restarted between coordinators
                self._lost(rank, now_s)
            else:
                raise Refused(f"{name} trains already, with other processes", again=True)
            member = self.members.get(name)
        if member is None:
            member = self._add(name, node, local_size, now_s)
        member.node = node or member.node
        member.present.add(local)
        self._absent.discard(rank)
        self._liveness.heard(rank, now_s)
        self._send(rank, "welcome", generation=self.generation)
        if self._tail is not None:
            if holding:  # it missed the message
                self._send(rank, "trained", step=self.step)
        elif generation and (holding or self.change is not None):
            self._break("the coordinator was replaced during a change", now_s)
            self._abort(rank)
        return self._settled(now_s)

    def ready(self, rank: Rank, now_s: float) -> list[Action]:
        """A newcomer is ready but for the run's state."""
        member = self._heard(rank, now_s)
        if member is not None and member.id not in self._training:
            member.ready.add(rank[1])
            if member.is_ready:
                self._ready.add(member.id)
        return self._settled(now_s)

    def proposed(self, rank: Rank, change: int, step: int, now_s: float) -> list[Action]:
        """A rank proposes a step after which it can hold."""
        self._heard(rank, now_s)
        if self._is_now(change, Phase.CALLING) and rank[0] in self._training:
            assert self.change is not None
            self.change.proposals[rank] = step
        return self._settled(now_s)

    def arrived(
        self,
        rank: Rank,
        change: int,
        step: int,
        now_s: float,
        *,
        has_state: bool = True,
        failed: bool = False,
        final: bool = False,
    ) -> list[Action]:
        """A rank holds. ``has_state``: it has trained, or could; ``final``: it has nothing more to
        train."""
        self._heard(rank, now_s)
        self.step = max(self.step, step)
        step = step if has_state else -1
        if rank[0] in self._training and self._tail is None:
            if self.change is None and failed:
                self._break(f"{rank[0]}: a collective failed", now_s)
            elif self.change is None:
                self._begin(Phase.HOLDING, f"{rank[0]} has trained to the end", now_s)
            assert self.change is not None
            if final and self.change.phase is Phase.FORMING and rank not in self.change.to_form:
                self.change.ended[rank] = Arrival(step, failed, final)
            elif change in (self.change.number, 0) or final:
                self.change.arrivals[rank] = Arrival(step, failed, final)
                if failed and self.change.phase in (Phase.CALLING, Phase.HOLDING):
                    self._break("a collective failed", now_s)
        return self._settled(now_s)

    def failed(
        self,
        rank: Rank,
        generation: int,
        now_s: float,
        *,
        reason: str = "",
        met: bool = True,
        lost_peer: bool = False,
    ) -> list[Action]:
        """A collective of this generation failed in a rank. ``reason``: how one of its processes
        ended; if several ranks report that, the first is the cause, as its end makes the others
        fail. Unless they had ``met``, none is to blame yet, and the cause is the report of a rank
        that did more than ``lost_peer``."""
        member = self._heard(rank, now_s)
        is_current = generation == self.generation and self._tail is None
        if is_current and member is not None and rank[0] in self._training:
            member.failure = reason
            cause = f"{rank[0]}: {reason}" if reason else "a collective failed"
            change = self.change
            if not met:
                cause = f"the generation could not meet ({cause})"
                if change is None:
                    self._failed_meetings.note(rank[0], reason, now_s, lost_peer=lost_peer)
                elif self._failed_meetings.explain(rank[0], reason, lost_peer=lost_peer):
                    change.cause = cause
            self._break(cause, now_s, culprit=rank[0] if reason and met else "")
        return self._settled(now_s)

    def resumed(self, rank: Rank, generation: int, step: int, now_s: float) -> list[Action]:
        """The new processes of a generation train on after this step."""
        self._heard(rank, now_s)
        if self._begun is not None and self._begun[0] == generation:
            _, before, since_s = self._begun
            self._begun, self.step = None, step
            self._has_met()
            self._record(
                "resumed",
                generation=generation,
                step=step,
                steps_lost=max(0, before - step),
                pause_s=round(now_s - since_s, 4),
            )
        return self._settled(now_s)

    def saved(self, rank: Rank, change: int, now_s: float) -> list[Action]:
        """The rank asked to save has done so, or cannot."""
        self._heard(rank, now_s)
        if self._is_now(change, Phase.SAVING):
            assert self.change is not None
            self.change.saved = True
        return self._settled(now_s)

    def formed(
        self,
        rank: Rank,
        change: int,
        ok: bool,
        pause_s: float,
        now_s: float,
        *,
        error: str = "",
        step: int | None = None,
        missing: Sequence[str] = (),
    ) -> list[Action]:
        """A rank has met the others of the new generation and trains on after this step (None: not
        known yet); or it has not, and ``error`` says why. ``missing``: members from which nothing
        was heard there."""
        self._heard(rank, now_s)
        if not self._is_now(change, Phase.FORMING):
            return self._settled(now_s)
        assert self.change is not None
        if not ok:
            if missing:
                error = f"{', '.join(missing)} did not come: {error}"
            self._failed_meetings.note(missing[0] if missing else rank[0], error, now_s)
            self._break(f"the generation could not meet ({rank[0]}: {error})", now_s)
        elif rank in self.change.to_form:
            self.change.to_form.remove(rank)
            self.change.resumes_behind, self.change.pause_s = step, pause_s
        return self._settled(now_s)

    def done(self, rank: Rank, now_s: float) -> list[Action]:
        """This rank's process has done what follows the training, and ends well."""
        self._heard(rank, now_s)
        if self._tail is not None and rank in self._tail:
            self._tail.remove(rank)
            self._record("done", member=rank[0], local_rank=rank[1])
        return self._settled(now_s)

    def resume_tail(self, step: int, *, done: Iterable[Rank], failed: Iterable[str]) -> None:
        """Resume a tail that an earlier coordinator saw begin at this step."""
        self.step, self._tail_failed = step, list(failed)
        self._tail = set(self._present_ranks()) - set(done)
        self._absent &= self._tail

    def leave(self, rank: Rank, reason: str, now_s: float) -> list[Action]:
        """A member announces that it has to leave."""
        member = self._heard(rank, now_s)
        if member is not None and not member.leaving:
            self._mark(member, reason or "asked to")
            self._record("leaving", member=member.id, node=member.node, reason=member.leaving)
        return self._settled(now_s)

    def lost(self, rank: Rank, now_s: float, *, fault: str = "") -> list[Action]:
        """A rank's connection has ended; ``fault``: our own fault that ended it."""
        if fault and (member := self.members.get(rank[0])) is not None:
            self._mark(member, fault)  # not a failure of the member
        self._lost(rank, now_s, why=fault or CONNECTION_ENDED)
        return self._settled(now_s)

    def beat(
        self,
        rank: Rank,
        step: int,
        now_s: float,
        *,
        waits: bool = False,
        paused: bool = False,
        collectives: int | None = None,
        meeting_s: float = 0.0,
        ended: bool = False,
    ) -> list[Action]:
        """A rank lives. ``waits``: its part of the step is done, or it is ``paused``. For agents,
        ``collectives``, ``meeting_s`` and ``ended`` of their processes: as
        :meth:`Liveness.progress`."""
        member = self._heard(rank, now_s)
        if member is not None:
            self._note_pause(member, rank, paused=paused)
        self.step = max(self.step, step)
        self._liveness.beat(rank, step, now_s, waits=waits)
        if rank[0] in self._training:
            self._liveness.progress(rank, collectives, meeting_s=meeting_s, ended=ended)
            if collectives and collectives > 1 and self.change is None:
                self._has_met()
        actions, self._actions = self._actions, []
        return actions

    def _note_pause(self, member: MemberState, rank: Rank, *, paused: bool) -> None:
        """Note a pause, for which the others wait; tell one of them when it begins."""
        before = bool(member.paused)
        (member.paused.add if paused else member.paused.discard)(rank[1])
        if bool(member.paused) == before or member.id not in self._training:
            return
        kind = "paused" if paused else "continued"
        self._record(kind, member=member.id, node=member.node)
        others = [rank for rank in self._present_ranks() if rank[0] != member.id]
        if paused and others:
            self._send(others[0], "paused", member=member.id, node=member.node)

    def scale(self, size: int, leave: Sequence[str], now_s: float, *, by: str = "") -> list[Action]:
        """Change the number of wanted members; ``leave`` go first, then the newest.

        Raises:
            ValueError: the size is out of bounds, or a member is unknown.
        """
        if unknown := [name for name in leave if name not in self.members]:
            raise ValueError(
                f"no member {', '.join(unknown)}; there are {', '.join(self.members) or 'none'}"
            )
        if not self.size.min <= size <= self.size.max:
            raise ValueError(
                f"{size} members are wanted, and this run may have {self.size.min} to "
                f"{self.size.max} (elastic.min, elastic.max)"
            )
        self.size = replace(self.size, wanted=size)
        self._record("wanted", size=size, by=by)
        for name in leave:
            self._mark(self.members[name], "asked to leave")
        return self._settled(now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Find silent and stuck ranks; call at least once a second."""
        # while no rank is heard, this end may be the one cut off; in the tail no rank waits for
        # another within a step, and an export may hold the GIL for long
        heard_until_s = max(self._liveness.newest_s(), now_s - CUT_OFF_S)
        while self._tail is None and (silent := self._liveness.most_silent()) is not None:
            rank, heard_s = silent
            if heard_until_s - heard_s <= self.timing.silent_s:
                break
            self._actions.append(Close(rank))
            self._lost(rank, now_s, why=f"silent for {now_s - heard_s:.1f} s")
        self._tell_who_is_awaited()
        trains = self.change is None and self._tail is None
        training = self._present_ranks() if trains else ()
        for rank in self._liveness.stuck(training, now_s, after_s=self.timing.stuck_s):
            self._lost(rank, now_s, why=f"hangs in a step: the others wait for {rank[0]}")
            self._actions.append(Close(rank))
        if self._absent and now_s > self._absent_until_s:
            for rank in sorted(self._absent):
                self._lost(rank, now_s, why="did not come back to the new coordinator")
        return self._settled(now_s)

    def restart_clocks(self, now_s: float) -> None:
        """Give every rank its full time again to be heard, after the coordinator itself stopped:
        they may have been stopped, too, and wake up later."""
        self._liveness.restart(now_s)
        self._absent_until_s = now_s + self.timing.return_s

    def due_s(self) -> float:
        """When :meth:`tick` is due, besides once a second."""
        return self._due_s

    # --- state
    # --------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where the run is in :data:`TRANSITIONS`."""
        if self.finished:
            return Phase.FINISHED
        if self.gave_up:
            return Phase.FAILED
        if self._tail is not None:
            return Phase.TAIL
        if self.change is not None:
            return self.change.phase
        return Phase.TRAINING if self.current else Phase.WAITING

    @property
    def is_in_tail(self) -> bool:
        """Whether the training is complete, and its tail still runs without a failure."""
        return self._tail is not None and not self._tail_failed

    @property
    def state(self) -> str:
        """The run's state in one word, for ``describe``."""
        if self.phase is Phase.WAITING and self.generation:
            return "Suspended"
        return _STATES.get(self.phase, "Resizing")

    @property
    def current(self) -> tuple[str, ...]:
        return self._current

    @current.setter
    def current(self, names: tuple[str, ...]) -> None:
        # in one change each of 10,000 members asks several times whether it trains
        self._current, self._training = names, frozenset(names)
        self._rank_count: int | None = None

    def state_of(self, member: MemberState) -> str:
        """Return a member's state in one word."""
        if member.leaving:
            return "Leaving"
        if member.paused:
            return "Paused"
        if member.id in self.current:
            return "Running"
        return "Ready" if member.is_ready else "Starting"

    # --- the current change
    # --------------------------------------------------------------------------------------------

    def _settled(self, now_s: float) -> list[Action]:
        """Make all transitions that are due; return the actions."""
        while (transition := self._next(now_s)) is not None:
            transition.then(self, now_s)
        actions, self._actions = self._actions, []
        return actions

    def _next(self, now_s: float) -> Transition | None:
        for transition in TRANSITIONS[self.phase]:
            if transition.when(self):
                self._due_s = min(self._due_s, now_s + transition.after_s(self, now_s))
                if now_s < self._due_s:
                    return None
                self._due_s = math.inf
                return transition
        self._due_s = math.inf
        return None

    def _begin(self, phase: Phase, cause: str, now_s: float) -> Change:
        self._changes += 1
        self.change = Change(self._changes, phase, now_s, cause, self.current)
        return self.change

    @property
    def _current_change(self) -> Change:
        assert self.change is not None
        return self.change

    def _is_now(self, change: int, phase: Phase) -> bool:
        current = self.change
        return current is not None and current.number == change and current.phase is phase

    def _break(self, cause: str, now_s: float, *, culprit: str = "") -> None:
        """Break the generation: its ranks drop their current step, and hold."""
        change = self.change
        if change is not None and change.phase in (Phase.BREAKING, Phase.SAVING, Phase.SUSPENDED):
            return  # they know, or hold
        if change is None:
            change = self._begin(Phase.BREAKING, cause, now_s)
        elif change.phase is Phase.FORMING:
            before, change = change, self._begin(Phase.BREAKING, cause, change.since_s)
            change.lost, change.steps_lost = before.lost, before.steps_lost
        else:
            change.phase, change.cause = Phase.BREAKING, cause
        change.culprit, change.is_whole = culprit, False
        for rank in self._present_ranks():
            self._abort(rank)

    def _abort(self, rank: Rank) -> None:
        change = self.change
        number, culprit = (change.number, change.culprit) if change is not None else (0, "")
        self._send(rank, "abort", change=number, generation=self.generation, culprit=culprit)

    def _forget(self, member: MemberState) -> None:
        """Go on without this member of the generation, in whose change it is lost."""
        self.current = tuple(name for name in self.current if name != member.id)
        change = self.change
        if change is not None:
            change.lost.append(member.id)
            change.is_whole = False
            for rank in member.ranks:
                change.arrivals.pop(rank, None)
                change.to_form.discard(rank)
            if change.saver is not None and change.saver[0] == member.id:
                change.saver = None

    # --- transitions: whether one is due. Count first where each rank counts: checking all ranks at
    # each message makes a change O(n²)
    # --------------------------------------------------------------------------------------------

    def _nobody_is_left(self) -> bool:
        return not self._count_ranks()

    def _idle_leave(self) -> bool:
        return not self._leaving <= self._training

    def _enough_are_ready(self) -> bool:
        return len(self._ready) >= self.size.min

    def _too_many_train(self) -> bool:
        return len(self.current) > self.size.wanted and len(self._staying()) > self.size.wanted

    def _some_leave(self) -> bool:
        # a new coordinator hears every rank first
        return not self._leaving.isdisjoint(self._training) and not self._absent

    def _some_can_join(self) -> bool:
        has_room = bool(self._ready) and len(self.current) < self.size.wanted
        return has_room and not self._absent and bool(self._newcomers())

    def _all_have_answered(self) -> bool:
        proposals, arrivals = self._current_change.proposals, self._current_change.arrivals
        return len(proposals) + len(arrivals) >= self._count_ranks() and all(
            rank in proposals or rank in arrivals for rank in self._present_ranks()
        )

    def _all_hold(self) -> bool:
        arrivals = self._current_change.arrivals
        return len(arrivals) >= self._count_ranks() and all(
            rank in arrivals for rank in self._present_ranks()
        )

    def _all_have_trained(self) -> bool:
        arrivals = self._current_change.arrivals.values()
        if not all(a.final for a in arrivals) or len({a.step for a in arrivals}) != 1:
            return False
        # a broken group, or one whose members leave, cannot do what follows
        is_whole = self._current_change.is_whole and self._leaving.isdisjoint(self._training)
        return is_whole or self.are_agents

    def _must_save(self) -> bool:
        change, staying = self._current_change, self._staying()
        goes_below = len(staying) < len(self.current) and len(staying) < self.size.min
        is_last = goes_below or self._failed_meetings.are_too_many
        return is_last and not change.saved and bool(change.holders)

    def _save_is_over(self) -> bool:
        """It has been made, or who was to make it is gone."""
        return self._current_change.saved or self._current_change.saver is None

    def _can_never_meet(self) -> bool:
        return self._failed_meetings.are_too_many

    def _are_enough(self) -> bool:
        return len(self._together()) >= self.size.min

    def _all_have_met(self) -> bool:
        return not self._current_change.to_form

    def _tail_is_over(self) -> bool:
        return not self._tail

    def _tail_has_failed(self) -> bool:
        return not self._tail and bool(self._tail_failed)

    def _always(self) -> bool:
        return True

    # --- transitions: how long that must have been so
    # --------------------------------------------------------------------------------------------

    def _at_once(self, _: float) -> float:
        return 0.0

    def _others_may_come_s(self, _: float) -> float:
        return 0.0 if len(self._ready) >= self.size.wanted else self.timing.gather_s

    def _others_may_join_s(self, _: float) -> float:
        return self.timing.join_s

    def _until_next_meeting_s(self, now_s: float) -> float:
        return max(0.0, self._failed_meetings.due_s - now_s)

    # --- transitions: what is done
    # --------------------------------------------------------------------------------------------

    def _see_off(self, _: float) -> None:
        """Let the leaving members go that do not train."""
        for member in self._in_joining_order(self._leaving - self._training):
            self._depart(member)

    def _start(self, now_s: float) -> None:
        self._begin(Phase.DECIDING, "start", now_s)

    def _mark_surplus(self, _: float) -> None:
        """Mark the newest members as leaving."""
        for name in reversed(self._staying()[self.size.wanted :]):
            self._mark(self.members[name], f"{self.size.wanted} members are wanted")

    def _call_to_leave(self, now_s: float) -> None:
        leaving = self._in_joining_order(self._leaving & self._training)
        self._call(f"leave ({', '.join(f'{m.id}: {m.leaving}' for m in leaving)})", now_s)

    def _call_to_join(self, now_s: float) -> None:
        self._call(f"join ({', '.join(m.id for m in self._newcomers())})", now_s)

    def _call(self, cause: str, now_s: float) -> None:
        change = self._begin(Phase.CALLING, cause, now_s)
        for rank in self._present_ranks():
            self._send(rank, "hold", change=change.number)

    def _hold(self, _: float) -> None:
        change = self._current_change
        at = max([*change.proposals.values(), *(a.step for a in change.arrivals.values())])
        change.phase = Phase.HOLDING
        for rank in self._present_ranks():
            self._send(rank, "hold_at", change=change.number, step=at)

    def _decide(self, _: float) -> None:
        change = self._current_change
        change.phase = Phase.DECIDING
        steps = {a.step for a in change.arrivals.values()}
        if any(a.failed for a in change.arrivals.values()) and len(steps) == 1 and min(steps) >= 0:
            change.steps_lost = 1

    def _expel(self, _: float) -> None:
        """Remove members as failed; the others go on without them."""
        why = str(self._failed_meetings)
        for member in [self.members[name] for name in self._blamed()]:
            reason = f"the others are to meet without this member, for {why}"
            self._record("failure", member=member.id, node=member.node, reason=reason)
            self._dismiss(member, reason, failed=True)
            self._forget(member)

    def _save(self, _: float) -> None:
        change = self._current_change
        change.phase = Phase.SAVING
        holders = change.holders
        change.saver = next(rank for rank in self._present_ranks() if rank in holders)
        self._send(change.saver, "save", change=change.number)

    def _give_up(self, _: float) -> None:
        """End a run that cannot go on."""
        self.gave_up = str(self._failed_meetings)
        self._record("gave_up", reason=self.gave_up)
        for member in list(self.members.values()):
            self._dismiss(member, self.gave_up, failed=True)
        self.change, self.current = None, ()

    def _suspend(self, _: float) -> None:
        """Wait for more members."""
        change = self._current_change
        self._part(self._remaining())
        change.phase = Phase.SUSPENDED
        self._record("suspended", members=list(self.current), min=self.size.min)
        for rank in self._present_ranks():
            self._send(rank, "wait", change=change.number)

    def _let_go(self, _: float) -> None:
        self._part(self._staying())

    def _disband(self, _: float) -> None:
        """Nobody is left: ready members start over."""
        self.change, self.current = None, ()

    def _form(self, _: float) -> None:
        """Have the new generation meet."""
        change, together = self._current_change, self._together()
        before = frozenset(self.current)
        self._part(self._remaining())
        holders = change.holders
        change.joined += [name for name in together if name not in before]
        change.phase = Phase.FORMING
        self.generation += 1
        self.current = tuple(together)
        self._liveness.begin_generation()
        self._ready -= self._training
        ranks = self._present_ranks()
        source = next((n for n, rank in enumerate(ranks) if rank in holders), 0)
        needs = [n for n, rank in enumerate(ranks) if n != source and rank not in holders]
        change.to_form = set(ranks)
        self._record(
            "forming",
            generation=self.generation,
            change=change.number,
            members=[[name, self.members[name].local_size] for name in together],
        )
        for name in together:
            self.members[name].failure = ""
        for number, rank in enumerate(ranks):
            self._send(
                rank,
                "form",
                change=change.number,
                generation=self.generation,
                rank=number,
                world_size=len(ranks),
                members=len(together),
                source=source,
                needs=needs,
                fresh=not holders,
                cause=change.cause,
            )

    def _train(self, now_s: float) -> None:
        change = self._current_change
        step = max((a.step for a in change.arrivals.values()), default=-1)
        if step < 0 and change.resumes_behind is not None:
            # no rank had the state: the work since the checkpoint, by the last beats, is lost
            change.steps_lost = max(0, self.step - change.resumes_behind)
            self.step = change.resumes_behind
        self._begun = (self.generation, self.step, change.since_s)
        self._record(
            "generation",
            generation=self.generation,
            step=step if step >= 0 else self.step,
            members=list(self.current),
            ranks=len(self._present_ranks()) * self.ranks_each,
            cause=change.cause,
            joined=change.joined,
            left=change.left,
            lost=change.lost,
            pause_s=round(change.pause_s, 4),
            steps_lost=change.steps_lost,
        )
        if not self.are_agents:
            self._has_met()
        self.change = None
        if change.ended:
            self._begin(Phase.HOLDING, "nothing to train", now_s).arrivals = change.ended

    def _end_training(self, now_s: float) -> None:
        """Begin the tail. Agents have done it already: they arrive when their processes end."""
        self.step = max(self.step, *(a.step for a in self._current_change.arrivals.values()))
        self.change = None
        if self.are_agents:
            self._finish(now_s)
            return
        self._tail, self._tail_failed = set(self._present_ranks()), []
        self._record("trained", step=self.step, generation=self.generation)
        for rank in self._present_ranks():
            self._send(rank, "trained", step=self.step)

    def _repeat_tail(self, _: float) -> None:
        """Ready members repeat the tail, from the last save."""
        for name in self.current:
            if (member := self.members.get(name)) is not None:
                self._drop(member)
        self._tail, self.current = None, ()

    def _finish(self, _: float) -> None:
        self.finished = True
        self._record("finished", step=self.step, generation=self.generation)
        for member in self.members.values():
            for rank in member.ranks:
                self._send(rank, "finished", step=self.step)

    # --- who trains next
    # --------------------------------------------------------------------------------------------

    def _staying(self) -> list[str]:
        return [name for name in self.current if name not in self._leaving]

    def _remaining(self) -> list[str]:
        """Return who of the generation goes on: all, if only leaving members have the newest state,
        which they send first."""
        staying, holders = self._staying(), {name for name, _ in self._current_change.holders}
        return (
            list(self.current) if staying and holders and holders.isdisjoint(staying) else staying
        )

    def _together(self) -> list[str]:
        """Return the members of the next generation in the order of their ranks."""
        remaining = self._remaining()
        is_alone = self._failed_meetings.leave_newcomers_out and len(remaining) >= self.size.min
        joining = [] if is_alone else self._newcomers()
        order = self._current_change.order
        return _in_order(order, remaining, [member.id for member in joining])

    def _newcomers(self) -> list[MemberState]:
        """Return the members that can join now, in joining order."""
        ready = self._in_joining_order(self._ready - self._leaving)
        return ready[: max(0, self.size.wanted - len(self._staying()))]

    def _in_joining_order(self, names: Iterable[str]) -> list[MemberState]:
        return sorted((self.members[name] for name in names), key=lambda member: member.order)

    def _blamed(self) -> list[str]:
        """Return the members that seem to be why generations cannot meet."""
        if not self._failed_meetings.leave_newcomers_out:
            return []
        arrivals = self._current_change.arrivals
        new = [
            name
            for name in self.current
            if name not in self._met
            and all(arrivals[rank].step < 0 for rank in self.members[name].ranks)
        ]
        return self._failed_meetings.blamed(self.current, new)

    def _has_met(self) -> None:
        """Note that this generation has met: earlier failures no longer count."""
        self._failed_meetings.forget()
        self._met = self._training

    def _part(self, remaining: Sequence[str]) -> None:
        """Let the others of the generation go."""
        change, stays = self._current_change, frozenset(remaining)
        for member in [self.members[name] for name in self.current if name not in stays]:
            change.left.append(member.id)
            for rank in member.ranks:
                change.arrivals.pop(rank, None)
            self._depart(member)
        self.current = tuple(remaining)

    # --- the members
    # --------------------------------------------------------------------------------------------

    def _add(self, name: str, node: str, local_size: int, now_s: float) -> MemberState:
        self._orders += 1
        member = MemberState(name, node, local_size, self._orders, now_s)
        self.members[name] = member
        return member

    def _present_ranks(self) -> list[Rank]:
        """Return the generation's ranks in order, with those a new coordinator still awaits."""
        return [
            rank
            for name in self.current
            if name in self.members
            for rank in self.members[name].ranks
        ]

    def _count_ranks(self) -> int:
        """Return the generation's size in ranks; members leave only together with ``current``."""
        if self._rank_count is None:
            sizes = (self.members[name].local_size for name in self.current if name in self.members)
            self._rank_count = sum(sizes)
        return self._rank_count

    def _mark(self, member: MemberState, reason: str) -> None:
        """Note that a member leaves; its first reason counts."""
        member.leaving = member.leaving or reason
        self._leaving.add(member.id)

    def _depart(self, member: MemberState) -> None:
        """Send a member away and record it."""
        self._dismiss(member, member.leaving)
        self._record("left", member=member.id, node=member.node, reason=member.leaving)

    def _dismiss(self, member: MemberState, reason: str, *, failed: bool = False) -> None:
        for rank in member.ranks:
            self._send(rank, "depart", reason=reason, failed=failed)
        self._drop(member)

    def _drop(self, member: MemberState) -> None:
        """Forget a member."""
        for rank in member.ranks:
            self._liveness.forget(rank)
        self.members.pop(member.id, None)
        self._ready.discard(member.id)
        self._leaving.discard(member.id)
        self._absent -= set(member.ranks)

    def _send(self, rank: Rank, kind: str, /, **fields: Any) -> None:
        member = self.members.get(rank[0])
        if member is None or rank[1] in member.present:
            self._actions.append(Send(rank, {"type": kind, **fields}))

    def _record(self, kind: str, **data: Any) -> None:
        self._actions.append(Record(kind, data))

    def _may_return(self, name: str, generation: int, holding: bool) -> bool:
        """Whether a rank may return. One that holds may have missed the last coordinator's ``form``
        message."""
        missed = holding and generation == self.generation - 1
        return name in self.current and (generation == self.generation or missed)

    def _heard(self, rank: Rank, now_s: float) -> MemberState | None:
        member = self.members.get(rank[0])
        if member is not None and rank[1] in member.present:
            self._liveness.heard(rank, now_s)
        return member

    def _tell_who_is_awaited(self) -> None:
        """Tell agents that others wait for them: they see only their own processes."""
        if not self._liveness.knows_progress:
            return
        change = self.change
        is_ending = (
            change is not None
            and change.phase is Phase.HOLDING
            and all(a.final for a in change.arrivals.values())
        )
        if change is None or is_ending:
            for rank, awaited in self._liveness.awaited(self._present_ranks()):
                self._send(rank, "awaited", generation=self.generation, **asdict(awaited))

    def _lost(self, rank: Rank, now_s: float, *, why: str = CONNECTION_ENDED) -> None:
        """Drop a lost rank's member: the other ranks on its node leave, too."""
        member = self.members.get(rank[0])
        self._liveness.forget(rank)
        if member is None or (rank[1] not in member.present and rank not in self._absent):
            return
        if self._tail is not None and member.id in self._training:
            self._lost_in_tail(rank, member, why)
            return
        self._drop(member)
        gone = f"rank {rank[1]} of this node is gone: {why}"
        for other in member.ranks:
            if other != rank and other[1] in member.present:
                self._send(other, "depart", reason=gone, failed=False)
        if member.id not in self.current or self.finished:
            return
        self._record(
            "left" if member.leaving else "failure",
            member=member.id,
            node=member.node,
            reason=member.leaving or member.failure or why,
        )
        self._failed_meetings.forget()
        self._break(f"{member.id} is gone ({why})", now_s)
        self._forget(member)

    def _lost_in_tail(self, rank: Rank, member: MemberState, why: str) -> None:
        """Handle the end of a rank's process. Unless it ended well, the others' collectives fail
        and they end, too; only the first counts as a failure."""
        assert self._tail is not None
        member.present.discard(rank[1])
        self._absent.discard(rank)
        if rank not in self._tail:
            return
        self._tail.remove(rank)
        if member.id not in self._tail_failed:
            self._record(
                "left" if member.leaving or self._tail_failed else "failure",
                member=member.id,
                node=member.node,
                reason=member.leaving or f"what follows the training was not done: {why}",
            )
            self._tail_failed.append(member.id)
        for other in self._present_ranks():
            self._abort(other)


class Transition(NamedTuple):
    """A change of phase, or a step within one.

    Attributes:
        when: its condition; what is true or not empty holds.
        then: does it, at this moment.
        to: phases in which it may end.
        after_s: for how long the condition must have held.
    """

    when: Callable[[Membership], object]
    then: Callable[[Membership, float], None]
    to: tuple[Phase, ...]
    after_s: Callable[[Membership, float], float] = Membership._at_once


_M = Membership
_SEE_OFF = _M._idle_leave, _M._see_off
_DISBAND = Transition(_M._nobody_is_left, _M._disband, (Phase.WAITING,))
_ALL_HOLD = _M._all_hold, _M._decide, (Phase.DECIDING,), _M._until_next_meeting_s

TRANSITIONS: Mapping[Phase, tuple[Transition, ...]] = {
    Phase.WAITING: (
        Transition(*_SEE_OFF, (Phase.WAITING,)),
        Transition(_M._enough_are_ready, _M._start, (Phase.DECIDING,), _M._others_may_come_s),
    ),
    Phase.TRAINING: (
        Transition(*_SEE_OFF, (Phase.TRAINING,)),
        Transition(_M._too_many_train, _M._mark_surplus, (Phase.TRAINING,)),
        Transition(_M._some_leave, _M._call_to_leave, (Phase.CALLING,)),
        Transition(_M._some_can_join, _M._call_to_join, (Phase.CALLING,), _M._others_may_join_s),
    ),
    Phase.CALLING: (
        _DISBAND,
        Transition(_M._all_have_answered, _M._hold, (Phase.HOLDING,)),
    ),
    Phase.HOLDING: (_DISBAND, Transition(*_ALL_HOLD)),
    Phase.BREAKING: (_DISBAND, Transition(*_ALL_HOLD)),
    Phase.DECIDING: (
        Transition(_M._blamed, _M._expel, (Phase.DECIDING,)),
        Transition(_M._all_have_trained, _M._end_training, (Phase.TAIL, Phase.FINISHED)),
        Transition(_M._must_save, _M._save, (Phase.SAVING,)),
        Transition(_M._can_never_meet, _M._give_up, (Phase.FAILED,)),
        Transition(_M._are_enough, _M._form, (Phase.FORMING,)),
        Transition(_M._always, _M._suspend, (Phase.SUSPENDED,)),
    ),
    Phase.SAVING: (
        _DISBAND,
        Transition(_M._save_is_over, _M._decide, (Phase.DECIDING,)),
    ),
    Phase.FORMING: (Transition(_M._all_have_met, _M._train, (Phase.TRAINING, Phase.HOLDING)),),
    Phase.SUSPENDED: (
        Transition(*_SEE_OFF, (Phase.SUSPENDED,)),
        Transition(_M._some_leave, _M._let_go, (Phase.SUSPENDED,)),
        _DISBAND,
        Transition(_M._are_enough, _M._form, (Phase.FORMING,)),
    ),
    Phase.TAIL: (
        Transition(_M._tail_has_failed, _M._repeat_tail, (Phase.WAITING,)),
        Transition(_M._tail_is_over, _M._finish, (Phase.FINISHED,)),
    ),
    Phase.FINISHED: (),
    Phase.FAILED: (),
}
"""In each phase, the first transition whose condition holds is made; then again, until none is."""


def _in_order(order: Sequence[str], staying: Sequence[str], joining: Sequence[str]) -> list[str]:
    """Give newcomers the places of those who left, so that the other ranks keep their numbers;
    append the rest."""
    waiting, stays = deque(joining), frozenset(staying)
    together = []
    for name in order:
        if name in stays:
            together.append(name)
        elif waiting:
            together.append(waiting.popleft())
    return [*together, *waiting]
