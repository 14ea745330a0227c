"""Who trains together: the state machine of an elastic run's coordinator. Pure.

It is told what happened and when, and returns what is to be sent and recorded; it knows no clock,
no socket and no file. One change of the generation goes through these phases:

    CALLING    every rank of the generation is asked where it can hold next
    HOLDING    all have answered: they train on to the largest step named, and hold there
    BREAKING   a rank is gone in the middle of a step: the others drop that step, and hold
    SAVING     too few would be left: one of them saves before anyone goes
    FORMING    they stand still; the new generation meets, and newcomers get the state
    SUSPENDED  they stand still, and wait for more members

A change that is called while all is well loses nothing: all ranks hold behind one step. One that a
death forces repeats at most the step in flight. Ranks that are one step ahead of others (a death
may let a collective succeed here and fail there) are the source of the state for these.

Only the newest generation trains. A rank that comes back from an older one is refused: what it has
trained since is not part of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from hydroslurm.elastic.changes import Changes
from hydroslurm.elastic.roster import (
    Action,
    Arrival,
    Close,
    MemberState,
    Phase,
    Rank,
    Refused,
    Size,
    Timing,
)


class Membership(Changes):
    """The members of one run.

    Attributes:
        size: may be replaced by :meth:`scale` only.
        generation: the number of the newest one; 0 before the first.
        current: its members, in the order of their ranks; () while none trains.
        finished: the training is complete.
        gave_up: why the run cannot go on, "" while it can.
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
        """``generation``, ``current`` (members and their numbers of ranks), ``change``: what an
        earlier coordinator has left; its ranks have ``return_s`` to come back."""
        super().__init__(
            size,
            timing or Timing(),
            generation=generation,
            current=current,
            change=change,
            now_s=now_s,
        )
        self._absent_until_s = now_s + self.timing.return_s

    # --- what happens
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
        """A rank has connected. ``generation``: the one that it trains in, 0 for a newcomer;
        ``holding``: it was in the middle of a change.

        Raises:
            Refused: it has no place here.
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
        if member is not None and local in member.present:
            raise Refused(f"rank {local} of {name} is connected already", again=True)
        if generation and not self._may_return(name, generation, holding):
            raise Refused(
                f"generation {generation} is over, {self.generation} trains: what this rank has "
                "trained since is not part of the run. Started anew it may join again"
            )
        if not generation and name in self._training:
            if member is not None and rank in self._absent:  # restarted while nobody looked
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
        if generation and (holding or self.change is not None):
            self._break("the coordinator was replaced during a change", now_s)
            self._abort(rank)
        return self._settled(now_s)

    def ready(self, rank: Rank, now_s: float) -> list[Action]:
        """A newcomer has everything but the state of the run."""
        member = self._heard(rank, now_s)
        if member is not None and member.id not in self._training:
            member.ready.add(rank[1])
            if member.is_ready:
                self._ready.add(member.id)
        return self._settled(now_s)

    def proposed(self, rank: Rank, change: int, step: int, now_s: float) -> list[Action]:
        """A rank says behind which step it can hold."""
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
        """A rank holds. ``has_state``: it is one that has trained, or could; ``final``: it has
        nothing more to train."""
        self._heard(rank, now_s)
        self.step = max(self.step, step)
        step = step if has_state else -1
        if rank[0] in self._training:
            if self.change is None:
                self._begin(Phase.BREAKING if failed else Phase.HOLDING, "", now_s)
                if failed:
                    self._tell_to_break()
            assert self.change is not None
            if change in (self.change.number, 0) or final:
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
        """A collective of this generation has failed in a rank. ``reason``: one of its processes
        has ended so; where several say that, the first did, for the others fail by its end. Unless
        they had ``met``, nobody is to blame for it yet, and the cause is what one tells that has
        not just ``lost_peer``."""
        member = self._heard(rank, now_s)
        if generation == self.generation and member is not None and rank[0] in self._training:
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
        """The processes of a generation that were started anew train on behind this step."""
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
        """The rank that was asked to save has done so, or cannot."""
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
    ) -> list[Action]:
        """A rank has met the others of the new generation and has the state, with which it trains
        on behind this step (None: it does not know yet); or it has not, and ``error`` says why."""
        self._heard(rank, now_s)
        if not self._is_now(change, Phase.FORMING):
            return self._settled(now_s)
        assert self.change is not None
        if not ok:
            self._failed_meetings.note(rank[0], error, now_s)
            self._break("the generation could not meet", now_s)
        elif rank in self.change.to_form:
            self.change.to_form.remove(rank)
            self.change.resumes_behind = step
            if not self.change.to_form:
                self._record_generation(pause_s)
                if not self.are_agents:
                    self._has_met()
                self.change = None
        return self._settled(now_s)

    def leave(self, rank: Rank, reason: str, now_s: float) -> list[Action]:
        """A member announces that it has to go."""
        member = self._heard(rank, now_s)
        if member is not None and not member.leaving:
            member.leaving, self._may_leave = reason or "asked to", True
            self._record("leaving", member=member.id, node=member.node, reason=member.leaving)
        return self._settled(now_s)

    def lost(self, rank: Rank, now_s: float) -> list[Action]:
        """The connection of a rank has ended."""
        self._lost(rank, now_s)
        return self._settled(now_s)

    def beat(
        self,
        rank: Rank,
        step: int,
        now_s: float,
        *,
        waits: bool = False,
        collectives: int | None = None,
        meeting_s: float = 0.0,
        ended: bool = False,
    ) -> list[Action]:
        """A rank lives. ``waits``: it has done its part of the step, or is paused; of the processes
        of an agent ``collectives``, ``meeting_s``, ``ended``: as :meth:`Liveness.progress`."""
        self._heard(rank, now_s)
        self.step = max(self.step, step)
        self._liveness.beat(rank, step, now_s, waits=waits)
        if rank[0] in self._training:
            self._liveness.progress(rank, collectives, meeting_s=meeting_s, ended=ended)
            if collectives and collectives > 1 and self.change is None:
                self._has_met()
        return []

    def scale(self, size: int, leave: Sequence[str], now_s: float, *, by: str = "") -> list[Action]:
        """Another number of members is wanted; those in ``leave`` go first, then the newest.

        Raises:
            ValueError: the size is out of bounds, or there is no such member.
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
        self.size = Size(min=self.size.min, max=self.size.max, wanted=size, spares=self.size.spares)
        self._record("wanted", size=size, by=by)
        for name in leave:
            self._may_leave = True
            self.members[name].leaving = self.members[name].leaving or "asked to leave"
        return self._settled(now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed."""
        while (silent := self._liveness.most_silent()) is not None:
            rank, heard_s = silent
            if now_s - heard_s <= self.timing.silent_s:
                break
            self._actions.append(Close(rank))
            self._lost(rank, now_s, why=f"silent for {now_s - heard_s:.1f} s")
        self._tell_who_is_awaited()
        for rank in self._stuck(now_s):
            self._lost(rank, now_s, why=f"hangs in a step: the others wait for {rank[0]}")
            self._actions.append(Close(rank))
        if self._absent and now_s > self._absent_until_s:
            for rank in sorted(self._absent):
                self._lost(rank, now_s, why="did not come back to the new coordinator")
        return self._settled(now_s)

    def due_s(self) -> float:
        """When :meth:`tick` is due at the latest."""
        due = [self.timing.silent_s + self._liveness.silent_from_s()]
        waits_s = (self._gather_until_s, self._join_at_s, self._meet_again_s)
        due += [one for one in waits_s if one is not None]
        if self._absent:
            due.append(self._absent_until_s)
        return min(due)

    # --- what is seen
    # --------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One word, as ``describe`` shows it."""
        if self.finished:
            return "Succeeded"
        if self.gave_up:
            return "Failed"
        if self.change is not None and self.change.phase is not Phase.SUSPENDED:
            return "Resizing"
        if self.current and self.change is None:
            return "Running"
        return "Suspended" if self.generation else "Waiting"

    def state_of(self, member: MemberState) -> str:
        """One word about a member."""
        if member.leaving:
            return "Leaving"
        if member.id in self.current:
            return "Running"
        return "Ready" if member.is_ready else "Starting"

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _is_now(self, change: int, phase: Phase) -> bool:
        now = self.change
        return now is not None and now.number == change and now.phase is phase

    def _may_return(self, name: str, generation: int, holding: bool) -> bool:
        """A rank that stands still may have missed the word of the generation that was forming
        when the last coordinator ended."""
        missed = holding and generation == self.generation - 1
        return name in self.current and (generation == self.generation or missed)

    def _heard(self, rank: Rank, now_s: float) -> MemberState | None:
        member = self.members.get(rank[0])
        if member is not None and rank[1] in member.present:
            self._liveness.heard(rank, now_s)
        return member

    def _stuck(self, now_s: float) -> list[Rank]:
        if self.change is not None:
            return []
        return self._liveness.stuck(self._present_ranks(), now_s, after_s=self.timing.stuck_s)

    def _tell_who_is_awaited(self) -> None:
        """Agents know what their processes do, and not that others wait for them."""
        if not self._liveness.knows_progress:
            return
        change = self.change
        is_ending = (
            change is not None
            and change.phase is Phase.HOLDING
            and all(one.final for one in change.arrivals.values())
        )
        if change is None or is_ending:
            for rank, awaited in self._liveness.awaited(self._present_ranks()):
                self._send(rank, "awaited", generation=self.generation, **asdict(awaited))

    def _lost(self, rank: Rank, now_s: float, *, why: str = "its connection ended") -> None:
        """One rank is gone, and with it its member: the others of its node leave too."""
        member = self.members.get(rank[0])
        self._liveness.forget(rank)
        if member is None or (rank[1] not in member.present and rank not in self._absent):
            return
        self._drop(member)
        gone = f"rank {rank[1]} of this node is gone: {why}"
        for other in member.ranks:
            if other != rank and other[1] in member.present:
                self._send(other, "depart", reason=gone, failed=False)
        if member.id not in self.current or self.finished:
            return
        announced = bool(member.leaving)
        self._record(
            "left" if announced else "failure",
            member=member.id,
            node=member.node,
            reason=member.leaving or member.failure or why,
        )
        self._failed_meetings.forget()
        change = self.change
        if change is not None and change.phase is Phase.SUSPENDED:
            self._forget(member)
            return
        self._break(f"{member.id} is gone ({why})", now_s)
        self._forget(member)
