"""What the coordinator knows of the ranks, and what it answers. Pure: messages in, messages out.

Everything that the ranks decide together is decided here, in one place and once, so two ranks never
receive different decisions. ``type`` names what a message of a rank asks for:

========================  =======================================================================
agree, withdraw           one value of every rank to all ranks, or one failure to all
call_barrier, propose     a stop barrier: the maximum of all proposals is the common safe point
pause, resume             a rank has causes of its own to be parked, or none any more
counts                    the collectives that a held rank has issued
leave                     a rank leaves, done or not; one that is cut off has died
========================  =======================================================================
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from hydroslurm.coordination.messages import Message, Outbox
from hydroslurm.coordination.pause_state import PauseState


class CoordinatorState:
    """The ranks of one incarnation.

    Attributes:
        world_size: how many there are.
        present: those that have joined and are connected.
        died, left: those that are gone: cut off, or in good order.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.present: set[int] = set()
        self.died: set[int] = set()
        self.left: set[int] = set()
        self._processes: dict[int, Any] = {}
        self._agreements = Agreements(world_size)
        self._pause = PauseState()
        self._barriers: dict[int, Message] = {}
        self._last_barrier = 0
        self._stopping = False
        self._early_calls: Outbox = []

    # --- joining and leaving

    def why_not(self, rank: int, world_size: int) -> str | None:
        """Why this rank may not join; None if it may."""
        if world_size != self.world_size:
            return f"it counts {world_size} ranks, the others {self.world_size}"
        if rank in self.present:
            return f"rank {rank} has joined already"
        if rank in self.died | self.left or self.left:
            return f"rank {rank} comes after ranks of this incarnation have ended"
        return None

    def join(self, rank: int, process: Any) -> Outbox:
        """A rank joins. Once all have, all are told."""
        self.present.add(rank)
        self._processes[rank] = process
        outbox: Outbox = [(rank, {"type": "welcome"})]
        outbox += [(rank, _rank_gone(other, died=True)) for other in sorted(self.died)]
        if len(self._processes) == self.world_size:
            outbox += self._all({"type": "all_joined", "ranks": self._processes})
            early, self._early_calls = self._early_calls, []
            for caller, message in early:
                outbox += self._call_barrier(caller, message)
        outbox += self._pause.catch_up(rank, self.present)
        return outbox

    def gone(self, rank: int, *, died: bool = True) -> Outbox:
        """A rank is not connected any more."""
        if rank not in self.present:
            return []
        self.present.discard(rank)
        (self.died if died else self.left).add(rank)
        outbox = self._all(_rank_gone(rank, died=died))
        outbox += self._agreements.without(rank)
        for number in sorted(self._barriers):
            outbox += self._evaluate_barrier(number)
        outbox += self._pause.without(rank, self.present)
        return outbox

    @property
    def is_over(self) -> bool:
        """Every rank has joined and is gone."""
        return len(self.died) + len(self.left) == self.world_size

    # --- requests of ranks

    def handle(self, rank: int, message: Message) -> Outbox:
        """Act on one message of a rank that is present.

        Raises:
            KeyError, TypeError, ValueError: not a message that a rank sends.
        """
        kind = message["type"]
        if kind == "agree":
            gone = self.died | self.left
            if max(message.get("among") or (0,)) >= self.world_size:
                raise ValueError(f"among {message['among']}, and there are {self.world_size} ranks")
            return self._agreements.submit(
                rank, message["topic"], message["value"], among=message.get("among"), gone=gone
            )
        if kind == "withdraw":
            return self._agreements.withdraw(rank, message["topic"])
        if kind == "call_barrier":
            return self._call_barrier(rank, message)
        if kind == "propose":
            return self._propose(rank, message["barrier"], int(message["safe_point_index"]))
        if kind == "pause":
            return [] if self._stopping else self._pause.pause(rank, self.present)
        if kind == "resume":
            return self._pause.resume(rank, self.present)
        if kind == "counts":
            return self._pause.counts(rank, message, self.present)
        if kind == "leave":
            return self.gone(rank, died=not message.get("done"))
        raise ValueError(f"no rank sends {kind!r}")

    # --- stop barriers

    def _call_barrier(self, rank: int, message: Message) -> Outbox:
        """One barrier of a kind at a time; after a stop there is none. None before all have joined:
        the others would wait for a rank that ends before it is known."""
        if len(self._processes) < self.world_size:
            self._early_calls.append((rank, message))
            return []
        kind = message["kind"]
        open_kinds = {one["kind"] for one in self._barriers.values()}
        if self._stopping or kind in open_kinds:
            return []
        outbox: Outbox = []
        if kind == "stop":
            self._stopping = True
            outbox += self._pause.abandon(self.present)
        self._last_barrier += 1
        number = self._last_barrier
        called = {"kind": kind, "of_rank": rank, "message": message.get("message")}
        self._barriers[number] = {**called, "proposals": {}}
        outbox += self._all({"type": "barrier_called", "barrier": number, **called})
        return outbox + self._evaluate_barrier(number)

    def _propose(self, rank: int, number: int, safe_point_index: int) -> Outbox:
        if number not in self._barriers:
            return []
        self._barriers[number]["proposals"][rank] = safe_point_index
        return self._evaluate_barrier(number)

    def _evaluate_barrier(self, number: int) -> Outbox:
        """The proposals of all ranks make a safe point; a rank that is gone makes a failure. A rank
        that left has trained to the end, and so will the others."""
        proposals = self._barriers[number]["proposals"]
        gone = self.died | self.left
        if gone:
            decision: Message = {"type": "barrier_failed", "missing": sorted(gone)}
            decision["finished"] = not self.died
        elif len(proposals) == self.world_size:
            decision = {"type": "barrier_agreed", "safe_point_index": max(proposals.values())}
        else:
            return []
        del self._barriers[number]
        return self._all({**decision, "barrier": number})

    def _all(self, message: Message) -> Outbox:
        return [(rank, message) for rank in sorted(self.present)]


def _rank_gone(rank: int, *, died: bool) -> Message:
    return {"type": "rank_gone", "rank": rank, "died": died}


@dataclass
class _Agreement:
    """One that is not decided."""

    among: tuple[int, ...]
    values: dict[int, Any] = field(default_factory=dict)


class Agreements:
    """All values to all who take part, or one failure to all; by topic. A decided agreement is
    forgotten, because all have it; a failed one is kept for ranks that have not asked yet."""

    def __init__(self, world_size: int) -> None:
        self._all_ranks = tuple(range(world_size))
        self._open: dict[str, _Agreement] = {}
        self._failed: dict[str, Message] = {}

    def submit(
        self, rank: int, topic: str, value: Any, *, among: Any, gone: Collection[int]
    ) -> Outbox:
        """Take a rank's value. The agreement fails if a participant is gone, or if ranks name
        different participants."""
        if topic in self._failed:
            return [(rank, self._failed[topic])]
        participants = self._all_ranks if among is None else tuple(sorted(map(int, among)))
        agreement = self._open.setdefault(topic, _Agreement(participants))
        agreement.values[rank] = value
        if participants != agreement.among or rank not in participants:
            # with thousands of ranks the lists are cut
            reason = f"asked among {list(agreement.among)!s:.400} and among "
            return self._fail(topic, message=f"{reason}{list(participants)!s:.400}")
        missing = [one for one in participants if one in gone and one not in agreement.values]
        if missing:
            return self._fail(topic, missing=missing)
        if len(agreement.values) < len(participants):
            return []
        del self._open[topic]
        values = [[one, agreement.values[one]] for one in participants]
        message = {"type": "agreed", "topic": topic, "values": values}
        return [(one, message) for one in participants if one not in gone]

    def withdraw(self, rank: int, topic: str) -> Outbox:
        """A rank has given up; without effect once the agreement is decided."""
        agreement = self._open.get(topic)
        if agreement is None or rank not in agreement.values:
            return []
        return self._fail(topic, withdrawn=(rank,))

    def without(self, rank: int) -> Outbox:
        """A rank is gone: fail what waits for its value."""
        outbox: Outbox = []
        for topic, agreement in list(self._open.items()):
            if rank in agreement.among and rank not in agreement.values:
                outbox += self._fail(topic, missing=(rank,))
        return outbox

    def _fail(
        self,
        topic: str,
        *,
        missing: Collection[int] = (),
        withdrawn: Collection[int] = (),
        message: str = "",
    ) -> Outbox:
        agreement = self._open.pop(topic)
        failure = {
            "type": "agreement_failed",
            "topic": topic,
            "missing": sorted(missing),
            "withdrawn": sorted(withdrawn),
            "message": message,
        }
        self._failed[topic] = failure
        return [(rank, failure) for rank in sorted(agreement.values)]
