"""One change of an elastic run's generation after the other. Pure.

The phases are those of :mod:`hydroslurm.elastic.membership`, which tells what happens; here is
decided what follows from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from hydroslurm.elastic.meetings import FailedMeetings
from hydroslurm.elastic.members import Members
from hydroslurm.elastic.roster import (
    Action,
    Change,
    MemberState,
    Phase,
    Rank,
    Size,
    Timing,
)

_GATHERING = (Phase.CALLING, Phase.HOLDING, Phase.BREAKING)


class Changes(Members):
    """The members, and the change that is under way.

    Attributes:
        ranks_each: of torch, where those that speak here are agents and start so many each.
        are_agents: whether they are: a generation that is formed has then yet to meet.
    """

    def __init__(
        self,
        size: Size,
        timing: Timing,
        *,
        generation: int,
        current: Iterable[tuple[str, int]],
        change: int,
        now_s: float,
    ) -> None:
        super().__init__(size, current=current, now_s=now_s)
        self.timing = timing
        self.generation = generation
        self.change: Change | None = None
        self.finished = False
        self.gave_up = ""
        self.suspended = False
        self.step = 0
        self.ranks_each = 1
        self.are_agents = False
        self._met: frozenset[str] = frozenset()
        self._changes = change
        self._gather_until_s: float | None = None
        self._join_at_s: float | None = None
        self._begun: tuple[int, int, float] | None = None
        self._failed_meetings = FailedMeetings()
        self._meet_again_s: float | None = None

    @property
    def _number(self) -> int:
        return self.change.number if self.change is not None else 0

    def _forget(self, member: MemberState) -> None:
        self.current = tuple(name for name in self.current if name != member.id)
        change = self.change
        if change is not None:
            change.lost.append(member.id)
            for rank in member.ranks:
                change.arrivals.pop(rank, None)
                change.to_form.discard(rank)
            if change.saver is not None and change.saver[0] == member.id:
                change.saver = None

    def _begin(self, phase: Phase, cause: str, now_s: float) -> Change:
        self._changes += 1
        self.change = Change(self._changes, phase, now_s, cause, self.current)
        return self.change

    def _break(self, cause: str, now_s: float, *, culprit: str = "") -> None:
        """The generation is broken: its ranks drop the step that they are in, and hold."""
        change = self.change
        if change is not None and change.phase is Phase.BREAKING:
            return
        held = change is not None and change.phase in (Phase.SAVING, Phase.SUSPENDED)
        if change is None or change.phase is Phase.FORMING:
            lost = change.lost if change is not None else []
            steps_lost = change.steps_lost if change is not None else 0
            since_s = change.since_s if change is not None else now_s
            change = self._begin(Phase.BREAKING, cause, since_s)
            change.lost, change.steps_lost = lost, steps_lost
        elif not held:
            change.phase, change.cause = Phase.BREAKING, cause
        if not held:
            assert self.change is not None
            self.change.culprit = culprit
            self._tell_to_break()

    def _tell_to_break(self) -> None:
        for rank in self._present_ranks():
            self._abort(rank)

    def _abort(self, rank: Rank) -> None:
        culprit = self.change.culprit if self.change is not None else ""
        self._send(rank, "abort", change=self._number, generation=self.generation, culprit=culprit)

    def _settled(self, now_s: float) -> list[Action]:
        """Go on as far as can be; return what is to be done."""
        while self._advance(now_s):
            pass
        actions, self._actions = self._actions, []
        return actions

    def _advance(self, now_s: float) -> bool:
        change = self.change
        if self.finished or self.gave_up:
            return False
        if change is None:
            return self._may_begin(now_s)
        if not self._count_ranks() and change.phase is not Phase.FORMING:
            self.change, self.current = None, ()  # nobody is left: whoever is ready begins anew
            return True
        answered = len(change.arrivals)
        if change.phase is Phase.CALLING:
            answered += len(change.proposals)
        if change.phase in _GATHERING and answered < self._count_ranks():
            return False  # counted first: to look at each, for each message, is n² of a change
        ranks = self._present_ranks() if change.phase in (*_GATHERING, Phase.SAVING) else []
        if change.phase is Phase.CALLING and all(
            rank in change.proposals or rank in change.arrivals for rank in ranks
        ):
            at = max([*change.proposals.values(), *(a.step for a in change.arrivals.values())])
            change.phase = Phase.HOLDING
            for rank in ranks:
                self._send(rank, "hold_at", change=change.number, step=at)
            return True
        if change.phase in (Phase.HOLDING, Phase.BREAKING) and all(
            rank in change.arrivals for rank in ranks
        ):
            return self._meet_again(change, ranks, now_s)
        if change.phase is Phase.SAVING:
            if change.saved:
                return self._form(change, now_s)
            if change.saver is None:
                return self._all_hold(change, ranks)
            return False
        if change.phase is Phase.SUSPENDED:
            return self._resume(change, now_s)
        if change.phase is Phase.FORMING and not change.to_form:
            self.change, self.current = None, ()
            return True
        return False

    def _may_begin(self, now_s: float) -> bool:
        """Whether a change is called for, while the generation trains, or none does."""
        if not self.current:
            return self._first(now_s)
        if self._absent:
            return False  # a coordinator that has just begun hears everybody first
        self._mark_surplus()
        leaving = [one.id for one in self._leavers() if one.id in self._training]
        if leaving:
            reasons = ", ".join(f"{name}: {self.members[name].leaving}" for name in leaving)
            self._call(f"leave ({reasons})", now_s)
            return True
        if not self._ready or len(self.current) >= self.size.wanted:
            self._join_at_s = None
            return False
        if self._join_at_s is None:
            self._join_at_s = now_s + self.timing.join_s
        if now_s < self._join_at_s:
            return False
        self._join_at_s = None
        joining = self._newcomers()
        if joining:
            self._call(f"join ({', '.join(one.id for one in joining)})", now_s)
        return bool(joining)

    def _first(self, now_s: float) -> bool:
        """Nobody trains: begin as soon as there are enough, and wait a little for all."""
        for member in self._leavers():
            self._depart(member)
        if len(self._ready) < self.size.min:
            self._gather_until_s = None
            return False
        if len(self._ready) < self.size.wanted:
            if self._gather_until_s is None:
                self._gather_until_s = now_s + self.timing.gather_s
            if now_s < self._gather_until_s:
                return False
        self._gather_until_s = None
        change = self._begin(Phase.FORMING, "start", now_s)
        return self._form(change, now_s)

    def _call(self, cause: str, now_s: float) -> None:
        change = self._begin(Phase.CALLING, cause, now_s)
        for rank in self._present_ranks():
            self._send(rank, "hold", change=change.number)

    def _meet_again(self, change: Change, ranks: list[Rank], now_s: float) -> bool:
        """All hold. If generations have failed to meet it is waited for a while, and whoever is
        taken for the cause is left out."""
        failed = self._failed_meetings
        self._meet_again_s = failed.due_s if now_s < failed.due_s else None
        if self._meet_again_s is not None:
            return False
        blamed: list[str] = []
        if failed.leave_newcomers_out:
            new = [
                name
                for name in self.current
                if name not in self._met
                and all(change.arrivals[rank].step < 0 for rank in self.members[name].ranks)
            ]
            blamed = failed.blamed(self.current, new)
        for name in blamed:
            self._expel(self.members[name], str(failed))
        return bool(blamed) or self._all_hold(change, ranks)

    def _has_met(self) -> None:
        """The generation of now can: what failed before is over."""
        self._failed_meetings.forget()
        self._met = self._training

    def _expel(self, member: MemberState, why: str) -> None:
        """The others go on without it, and it has failed."""
        reason = f"the others are to meet without this member, for {why}"
        self._record("failure", member=member.id, node=member.node, reason=reason)
        for rank in member.ranks:
            self._send(rank, "depart", reason=reason, failed=True)
        self._drop(member)
        self._forget(member)

    def _give_up(self) -> None:
        """The run cannot go on."""
        self.gave_up = str(self._failed_meetings)
        self._record("gave_up", reason=self.gave_up)
        for member in list(self.members.values()):
            for rank in member.ranks:
                self._send(rank, "depart", reason=self.gave_up, failed=True)
            self._drop(member)
        self.change, self.current = None, ()

    def _all_hold(self, change: Change, ranks: list[Rank]) -> bool:
        """Everybody stands still: who goes on?"""
        arrivals = [change.arrivals[rank] for rank in ranks]
        steps = {one.step for one in arrivals}
        if all(one.final for one in arrivals) and len(steps) == 1:
            self._finish(max(steps.pop(), self.step))
            return False
        if any(one.failed for one in arrivals) and max(steps) == min(steps) >= 0:
            change.steps_lost = 1
        self._mark_surplus()
        staying = [name for name in self.current if not self.members[name].leaving]
        newest = max(steps)
        goes_below = len(staying) < len(self.current) and len(staying) < self.size.min
        is_last = goes_below or self._failed_meetings.are_too_many
        if is_last and newest >= 0 and not change.saved:
            change.phase = Phase.SAVING
            change.saver = next(r for r in ranks if change.arrivals[r].step == newest)
            self._send(change.saver, "save", change=change.number)
            return True
        return self._form(change, 0.0)

    def _form(self, change: Change, now_s: float) -> bool:
        """Name the new generation, or wait for more."""
        del now_s
        if self._failed_meetings.are_too_many:
            self._give_up()
            return False
        held = {rank: one.step for rank, one in change.arrivals.items() if one.step >= 0}
        newest = max(held.values(), default=None)
        staying = [name for name in self.current if not self.members[name].leaving]
        has_state = [
            name
            for name in staying
            if any(held.get(rank) == newest for rank in self.members[name].ranks)
        ]
        if staying and not has_state:  # only who leaves has the newest state: it hands it over
            staying = list(self.current)
        else:
            for name in [one for one in self.current if self.members[one].leaving]:
                change.left.append(name)
                self._depart(self.members[name])
            self.current = tuple(staying)
        are_alone = self._failed_meetings.leave_newcomers_out and len(staying) >= self.size.min
        joining = [] if are_alone else self._newcomers()
        together = _in_order(change.order, staying, [member.id for member in joining])
        if len(together) < self.size.min:
            if change.phase is not Phase.SUSPENDED:
                change.phase, self.suspended = Phase.SUSPENDED, True
                self._record("suspended", members=list(staying), min=self.size.min)
                for rank in self._present_ranks():
                    self._send(rank, "wait", change=change.number)
            if not staying:
                self.change = None
            return False
        self._begin_generation(change, together, held, newest)
        change.joined += [member.id for member in joining]
        return True

    def _begin_generation(
        self, change: Change, together: list[str], held: dict[Rank, int], newest: int | None
    ) -> None:
        change.phase, self.suspended = Phase.FORMING, False
        self.generation += 1
        self.current = tuple(together)
        self._liveness.begin_generation()
        self._ready -= self._training
        self._join_at_s = None
        ranks = self._present_ranks()
        source = next((n for n, rank in enumerate(ranks) if held.get(rank) == newest), 0)
        needs = [n for n, rank in enumerate(ranks) if newest is None or held.get(rank) != newest]
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
                needs=[one for one in needs if one != source or newest is not None],
                fresh=newest is None,
                cause=change.cause,
            )

    def _resume(self, change: Change, now_s: float) -> bool:
        for name in [n for n in self.current if self.members[n].leaving]:
            change.left.append(name)
            self._depart(self.members[name])
            self.current = tuple(one for one in self.current if one != name)
        if not self.current:
            self.change = None
            return True
        if len(self.current) + len(self._newcomers()) < self.size.min:
            return False
        del now_s
        return self._form(change, 0.0)

    def _finish(self, step: int) -> None:
        self.finished = True
        self.change = None
        self._record("finished", step=step, generation=self.generation)
        for member in self.members.values():
            for rank in member.ranks:
                self._send(rank, "finished", step=step)

    def _record_generation(self, pause_s: float) -> None:
        change = self.change
        assert change is not None
        step = max((one.step for one in change.arrivals.values()), default=-1)
        if step < 0 and change.resumes_behind is not None:
            # nobody was left who had the state: what was trained behind the checkpoint is lost, as
            # far as the last beats had told of it
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
            pause_s=round(pause_s, 4),
            steps_lost=change.steps_lost,
        )


def _in_order(order: Sequence[str], staying: Sequence[str], joining: Sequence[str]) -> list[str]:
    """Who comes takes the place of who went, so that the ranks of the others stay what they are;
    the rest is appended."""
    waiting, stays = deque(joining), frozenset(staying)
    together = []
    for name in order:
        if name in stays:
            together.append(name)
        elif waiting:
            together.append(waiting.popleft())
    return [*together, *waiting]
