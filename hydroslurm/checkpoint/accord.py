"""What the savers of all ranks agree on before they act, so that all of them do the same.

A rank by itself cannot know whether the others still have a save under way, or how much time they
have left. One :class:`Call` is one call of a saver's method, made by every rank in the same order;
it numbers the topics. Of one rank alone nobody is asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from hydroslurm.checkpoint.commit_vote import CommitVote, checked, decline, failed
from hydroslurm.checkpoint.contents import State
from hydroslurm.checkpoint.deadline import InFlight, Situation
from hydroslurm.checkpoint.peers import Peers
from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.checkpoint.tiered_writer import SaveRequest
from hydroslurm.checkpoint.write_plan import WritePlan, divide
from hydroslurm.errors import CheckpointError, RanksError, SaveFailed, UsageError


class Accord:
    """Hands out the calls of one saver. For the thread that trains."""

    def __init__(self, peers: Peers | None, *, topic: str, patience_s: float) -> None:
        """``topic``: begins those of all calls; no other saver of these ranks has the same."""
        self._peers = peers
        self._topic = topic
        self._patience_s = patience_s
        self._count = 0

    def hold(self, state: State) -> State | WritePlan:
        """What this rank has to save of it; raises UnsavableState."""
        return Call(self._peers, "", step=0, patience_s=0.0).hold(state)

    def decline(self, order: SaveRequest, error: BaseException) -> None:
        """Tell the ranks that begin a save that this one cannot. Never raises."""
        topic = order.topic or ""
        Call(self._peers, topic, step=order.step, patience_s=self._patience_s).decline(error)

    def call(self, step: int) -> Call:
        """The next one."""
        self._count += 1
        topic = f"{self._topic}/{self._count}"
        return Call(self._peers, topic, step=step, patience_s=self._patience_s)


@dataclass(frozen=True)
class Call:
    """One call of a saver's method."""

    peers: Peers | None
    topic: str
    step: int
    patience_s: float

    def hold(self, state: State) -> State | WritePlan:
        """What this rank has to save of it; raises UnsavableState."""
        if self.peers is None:
            return state
        return divide(state, rank=self.peers.rank, world_size=self.peers.world_size)

    def try_hold(self, state: State) -> tuple[State | WritePlan, BaseException | None]:
        """The same, or why not, which the others must hear of first."""
        try:
            return self.hold(state), None
        except Exception as problem:
            return state, problem

    def busy(self, step: int | None, *, problem: BaseException | None = None) -> str | None:
        """Why no save can begin now, in words; None when one can.

        Args:
            step: of the save that is under way here.
            problem: why this rank cannot take part.

        Raises:
            SaveFailed, UnsavableState: on all ranks; one cannot take part, or is gone.
        """
        if self.peers is None:
            return None if step is None else f"the save of step {step} is still under way"
        answer = {"busy": step} if problem is None else failed(problem)
        answers = self._agree("start", answer).items()
        told = {rank: checked(one, rank=rank, busy=(int, NoneType)) for rank, one in answers}
        busy = {rank: one["busy"] for rank, one in told.items() if one["busy"] is not None}
        if not busy:
            return None
        ranks = ", ".join(map(str, busy))
        return f"the save of step {max(busy.values())} is still under way (on rank {ranks})"

    def situation(
        self, now: Situation | None, *, problem: BaseException | None = None
    ) -> Situation | None:
        """The situation of all ranks together; None when there is a problem and nobody to tell it.

        Raises:
            SaveFailed, UnsavableState: as in :meth:`busy`.
        """
        if self.peers is None:
            return now
        if now is None or problem is not None:
            self._agree("situation", failed(problem or AssertionError("no situation")))
            return None
        answers = self._agree("situation", _to_json(now), left_s=now.left_s)
        return _together(now, [_situation_of(rank, one) for rank, one in answers.items()])

    def all_done(self, done: bool, *, left_s: float) -> bool:
        """Whether no rank needs another save; raises SaveFailed when one is gone."""
        if self.peers is None:
            return done
        answers = self._agree("done", {"done": done}, left_s=left_s)
        return all(checked(one, rank=rank, done=bool)["done"] for rank, one in answers.items())

    def decline(self, error: BaseException) -> None:
        """Tell the ranks that begin the save of this call that this one cannot. Never raises."""
        if self.peers is not None:
            with suppress(CheckpointError, RanksError):
                decline(self._meeting(self.patience_s), error)

    def _agree(
        self, what: str, answer: Mapping[str, Any], *, left_s: float = math.inf
    ) -> Mapping[int, Any]:
        meeting = self._meeting(min(self.patience_s, max(0.0, left_s)))
        return meeting.agree_before_commit(what, dict(answer))

    def _meeting(self, timeout_s: float) -> CommitVote:
        assert self.peers is not None
        return CommitVote(self.peers, self.topic, step=self.step, timeout_s=timeout_s)


def check_peers(
    peers: Peers | None, *, durable: CheckpointStore, fast: CheckpointStore | None
) -> None:
    """Raise UsageError for a saver that cannot be for these ranks."""
    if peers is not None and peers.world_size > 1 and peers is not durable.peers:
        raise UsageError("the saver's peers are not its store's; give the store the same ones")
    if durable.peers is not None and fast is not None:
        raise UsageError(
            f"a fast tier ({fast.directory}) is for one rank; {durable.peers.world_size} ranks "
            "save to the durable one only. Leave the fast one out"
        )


def _to_json(now: Situation) -> dict[str, Any]:
    flight = now.in_flight
    return {
        "left_s": None if math.isinf(now.left_s) else now.left_s,
        "durable_s": now.durable_s,
        "in_flight": None
        if flight is None
        else [flight.step, flight.remaining_s, int(flight.is_this)],
        "committed_step": now.committed_step,
        "is_committed": now.is_committed,
    }


def _situation_of(rank: int, answer: Any) -> dict[str, Any]:
    number = (int, float)
    told = checked(
        answer,
        rank=rank,
        left_s=(*number, NoneType),
        durable_s=number,
        in_flight=(list, NoneType),
        committed_step=(int, NoneType),
        is_committed=bool,
    )
    flight = told["in_flight"]
    if flight is not None and [type(one) in number for one in flight] != [True] * 3:
        raise SaveFailed(f"rank {rank} speaks of a save in flight as {flight!r:.80}")
    return told


def _together(now: Situation, told: list[dict[str, Any]]) -> Situation:
    """The least time, the slowest disk, any save in flight, and what all know to be committed."""
    left_s = [one["left_s"] for one in told if one["left_s"] is not None]
    flights = [one["in_flight"] for one in told if one["in_flight"] is not None]
    steps = [one["committed_step"] for one in told]
    return replace(
        now,
        left_s=min(left_s, default=math.inf),
        durable_s=max(one["durable_s"] for one in told),
        in_flight=InFlight(
            max(step for step, _, _ in flights),
            max(rest for _, rest, _ in flights),
            is_this=all(is_this for _, _, is_this in flights),
        )
        if flights
        else None,
        committed_step=None if None in steps else min(steps),
        is_committed=all(one["is_committed"] for one in told),
    )
