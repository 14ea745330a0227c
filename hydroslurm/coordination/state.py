"""What the hub knows of the ranks, and what it answers. Pure: messages in, messages out.

Everything that ranks decide together is decided here, in one place and once, so that two ranks
never hear different things. Messages are plain dicts; ``do`` names what a rank wants, ``say`` what
the hub tells.

====================  ===========================================================================
agree, withdraw       one value of every rank to all ranks, or one failure to all
want, promise         a meeting: the largest place that was promised is the common one
pause, resume         a rank has causes of its own to be parked, or none any more
counts                the collectives that a held rank has issued
bye                   a rank leaves, done or not; one that is cut off has died
====================  ===========================================================================
"""

from __future__ import annotations

from typing import Any

from hydroslurm.coordination.agreements import Agreements
from hydroslurm.coordination.pause_state import Pausing

Message = dict[str, Any]
Outbox = list[tuple[int, Message]]
"""Rank and message, in the order in which they are to be sent."""


class CoordinatorState:
    """The ranks of one life.

    Attributes:
        world_size: how many there are.
        present: those that have joined and are connected.
        died, left: those that are gone, cut off or in good order.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.present: set[int] = set()
        self.died: set[int] = set()
        self.left: set[int] = set()
        self._pids: dict[int, Any] = {}
        self._agreements = Agreements(world_size)
        self._pausing = Pausing()
        self._meetings: dict[int, Message] = {}
        self._numbers = 0
        self._stopping = False
        self._early: Outbox = []

    # --- coming and going
    # --------------------------------------------------------------------------------------------

    def why_not(self, rank: int, world_size: int) -> str | None:
        """Why this rank may not join; None: it may."""
        if world_size != self.world_size:
            return f"it counts {world_size} ranks, the others {self.world_size}"
        if rank in self.present:
            return f"rank {rank} has joined already"
        if rank in self.died | self.left or self.left:
            return f"rank {rank} comes after ranks of this life have ended"
        return None

    def join(self, rank: int, who: Any) -> Outbox:
        """A rank is here. When all are, all are told."""
        self.present.add(rank)
        self._pids[rank] = who
        letters = [(rank, {"say": "welcome"})]
        letters += [(rank, self._gone(other, died=True)) for other in sorted(self.died)]
        if len(self._pids) == self.world_size:
            letters += self._all({"say": "everybody", "ranks": self._pids})
            early, self._early = self._early, []
            for caller, message in early:
                letters += self._call(caller, message)
        letters += self._pausing.catch_up(rank, self.present)
        return letters

    def gone(self, rank: int, *, died: bool = True) -> Outbox:
        """A rank is not connected any more."""
        if rank not in self.present:
            return []
        self.present.discard(rank)
        (self.died if died else self.left).add(rank)
        letters = self._all(self._gone(rank, died=died))
        letters += self._agreements.without(rank)
        for number in sorted(self._meetings):
            letters += self._judge(number)
        letters += self._pausing.without(rank, self.present)
        return letters

    @property
    def is_over(self) -> bool:
        """Every rank has been here and is gone."""
        return len(self.died) + len(self.left) == self.world_size

    # --- what ranks want
    # --------------------------------------------------------------------------------------------

    def handle(self, rank: int, message: Message) -> Outbox:
        """One message of a rank that is present.

        Raises:
            KeyError, TypeError, ValueError: it is none that a rank sends.
        """
        do = message["do"]
        if do == "agree":
            gone = self.died | self.left
            if max(message.get("among") or (0,)) >= self.world_size:
                raise ValueError(f"among {message['among']}, and there are {self.world_size} ranks")
            return self._agreements.hand_in(
                rank, message["topic"], message["value"], among=message.get("among"), gone=gone
            )
        if do == "withdraw":
            return self._agreements.withdraw(rank, message["topic"])
        if do == "want":
            return self._call(rank, message)
        if do == "promise":
            return self._promise(rank, message["meeting"], int(message["place"]))
        if do == "pause":
            return [] if self._stopping else self._pausing.pause(rank, self.present)
        if do == "resume":
            return self._pausing.resume(rank, self.present)
        if do == "counts":
            return self._pausing.counts(rank, message, self.present)
        if do == "bye":
            return self.gone(rank, died=not message.get("done"))
        raise ValueError(f"no rank says {do!r}")

    # --- meetings
    # --------------------------------------------------------------------------------------------

    def _call(self, rank: int, message: Message) -> Outbox:
        """One meeting of a kind at a time; after a stop there is none. None before all have joined:
        a rank that ends before it is known would be waited for."""
        if len(self._pids) < self.world_size:
            self._early.append((rank, message))
            return []
        kind = message["kind"]
        open_kinds = {one["kind"] for one in self._meetings.values()}
        if self._stopping or kind in open_kinds:
            return []
        letters: Outbox = []
        if kind == "stop":
            self._stopping = True
            letters += self._pausing.abandon(self.present)
        self._numbers += 1
        meeting = {"kind": kind, "of_rank": rank, "words": message.get("words"), "promises": {}}
        self._meetings[self._numbers] = meeting
        letters += self._all(self._wanted(self._numbers))
        return letters + self._judge(self._numbers)

    def _promise(self, rank: int, number: int, place: int) -> Outbox:
        if number not in self._meetings:
            return []
        self._meetings[number]["promises"][rank] = place
        return self._judge(number)

    def _judge(self, number: int) -> Outbox:
        """Everybody's promise makes a place; a rank that is gone makes a failure. A rank that left
        has finished, and so will the others."""
        meeting = self._meetings[number]
        promises = meeting["promises"]
        gone = self.died | self.left
        if gone:
            verdict: Message = {"say": "meeting_failed", "missing": sorted(gone)}
            verdict["finished"] = not self.died
        elif len(promises) == self.world_size:
            verdict = {"say": "meet", "place": max(promises.values())}
        else:
            return []
        del self._meetings[number]
        return self._all({**verdict, "meeting": number})

    def _wanted(self, number: int) -> Message:
        meeting = self._meetings[number]
        told = {name: meeting[name] for name in ("kind", "of_rank", "words")}
        return {"say": "wanted", "meeting": number, **told}

    # --- letters
    # --------------------------------------------------------------------------------------------

    def _all(self, message: Message) -> Outbox:
        return [(rank, message) for rank in sorted(self.present)]

    def _gone(self, rank: int, *, died: bool) -> Message:
        return {"say": "gone", "rank": rank, "died": died}
