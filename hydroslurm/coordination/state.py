"""What the coordinator knows of the ranks, and what it answers. Pure: messages in, messages out.

Everything that the ranks decide together is decided here, in one place and once, so two ranks never
receive different decisions. Nothing that a message makes happen takes longer the more ranks there
are, except where all of them are answered. ``type`` names what a message of a rank asks for:

========================  =======================================================================
agree, withdraw           one value of every rank to all ranks or to some, or one failure to all
call_barrier, propose     a stop barrier: the maximum of all proposals is the common safe point
pause, resume             a rank has causes of its own to be parked, or none any more
counts                    the collectives that a held rank has issued
members                   the ranks of process groups, from a rank that was asked for them
leave                     a rank leaves, done or not; one that is cut off has died
========================  =======================================================================

The values of an agreement are texts that are only compared. Ranks that submit the same text are
told as runs of ranks, so an agreement in which all ranks say the same costs each of them one text,
however many they are. Values that differ are told in full to all who get them; where only a rank
that decides needs them, ``collect_at`` spares the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from hydroslurm.coordination.messages import BadMessage, Message, Outbox, Runs, ranks_of, runs_of
from hydroslurm.coordination.pause_state import PauseState


class CoordinatorState:
    """The ranks of one incarnation.

    Attributes:
        world_size: how many there are.
        present: ranks that have joined and are connected.
        died, left: ranks that are gone: cut off, or in good order.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.present: set[int] = set()
        self.died: set[int] = set()
        self.left: set[int] = set()
        self._joined = 0
        self._cut_off: set[str] = set()
        self._unannounced: set[int] = set()
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
        if rank in self.died or self.left:
            return f"rank {rank} comes after ranks of this incarnation have ended"
        return None

    def join(self, rank: int, cut_off: Iterable[str]) -> Outbox:
        """A rank joins. Once all have, all are told.

        Args:
            cut_off: operations that it had started at coordinators that are gone.
        """
        self.present.add(rank)
        self._joined += 1
        self._cut_off.update(cut_off)
        outbox: Outbox = [(rank, {"type": "welcome"})]
        if self.died:
            outbox.append((rank, _ranks_gone(died=self.died)))
        if self._joined == self.world_size:
            outbox += self._all({"type": "all_joined", "cut_off": sorted(self._cut_off)})
            early, self._early_calls = self._early_calls, []
            for caller, message in early:
                outbox += self._call_barrier(caller, message)
        outbox += self._pause.catch_up(rank, self.present)
        return outbox

    def gone(self, rank: int, *, died: bool = True) -> Outbox:
        """A rank is not connected any more. The others hear of it by :meth:`announce`, and at once
        if they wait for it."""
        if rank not in self.present:
            return []
        self.present.discard(rank)
        (self.died if died else self.left).add(rank)
        self._unannounced.add(rank)
        outbox = self._agreements.without(rank)
        for number in sorted(self._barriers):
            outbox += self._evaluate_barrier(number)
        outbox += self._pause.without(rank, self.present)
        return outbox

    @property
    def has_news(self) -> bool:
        """Whether ranks are gone that were not announced."""
        return bool(self._unannounced)

    def announce(self) -> Outbox:
        """Tell all who is gone since the last time. For the caller to time: when all ranks end one
        after the other, telling all of each at once would be quadratic."""
        news, self._unannounced = self._unannounced, set()
        return self._all(_ranks_gone(died=news & self.died, left=news & self.left))

    @property
    def is_over(self) -> bool:
        """Every rank has joined and is gone."""
        return len(self.died) + len(self.left) == self.world_size

    # --- requests of ranks

    def handle(self, rank: int, message: Message) -> Outbox:
        """Act on one message of a rank that is present.

        Raises:
            BadMessage: not one that a rank sends here.
        """
        kind = message["type"]
        if kind == "agree":
            among, collect_at = message["among"], message["collect_at"]
            self._require_ranks([] if among is None else among)
            self._require_ranks([[one, one] for one in collect_at or ()])
            return self._agreements.submit(rank, message, died=self.died, left=self.left)
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
        if kind == "members":
            for runs in message["groups"].values():
                self._require_ranks(runs)
            return self._pause.members(rank, message["groups"], self.present)
        if kind == "leave":
            return self.gone(rank, died=not message.get("done"))
        raise BadMessage(f"no rank that has joined sends {kind!r}")

    def _require_ranks(self, runs: Runs) -> None:
        if any(last >= self.world_size for _, last in runs):
            raise BadMessage(f"ranks {runs!s:.80}, and there are {self.world_size}")

    # --- stop barriers

    def _call_barrier(self, rank: int, message: Message) -> Outbox:
        """One barrier of a kind at a time; after a stop there is none. None before all have joined:
        the others would wait for a rank that ends before it is known."""
        if self._joined < self.world_size:
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
        if self.died or self.left:
            missing = runs_of(self.died | self.left)
            decision: Message = {"type": "barrier_failed", "missing": missing}
            decision["finished"] = not self.died
        elif len(proposals) == self.world_size:
            decision = {"type": "barrier_agreed", "safe_point_index": max(proposals.values())}
        else:
            return []
        del self._barriers[number]
        return self._all({**decision, "barrier": number})

    def _all(self, message: Message) -> Outbox:
        return [(rank, message) for rank in sorted(self.present)]


def _ranks_gone(*, died: Iterable[int], left: Iterable[int] = ()) -> Message:
    return {"type": "ranks_gone", "died": runs_of(died), "left": runs_of(left)}


@dataclass
class _Agreement:
    """One that is not decided.

    Attributes:
        among: as it was asked for; None: all.
        collectors: rank -> for whom its value is, where it is not for all.
    """

    among: Runs | None
    participants: Collection[int]
    values: dict[int, str] = field(default_factory=dict)
    collectors: dict[int, tuple[int, ...]] = field(default_factory=dict)


class Agreements:
    """The values of all who take part, or one failure to all; by topic. A decided agreement is
    forgotten, because all have it; a failed one is kept for ranks that have not asked yet."""

    def __init__(self, world_size: int) -> None:
        self._all_ranks = range(world_size)
        self._open: dict[str, _Agreement] = {}
        self._failed: dict[str, Message] = {}

    def submit(
        self, rank: int, message: Message, *, died: Collection[int], left: Collection[int]
    ) -> Outbox:
        """Take a rank's value. The agreement fails if a participant is gone, or if ranks name
        different participants.

        Args:
            message: ``topic``, ``value``, ``among`` and ``collect_at`` as they travel; the ranks
                exist.
            died, left: who is gone.
        """
        topic, among = message["topic"], message["among"]
        if topic in self._failed:
            return [(rank, self._failed[topic])]
        agreement = self._open.get(topic)
        missing: list[int] = []
        if agreement is None:
            participants = self._all_ranks if among is None else frozenset(ranks_of(among))
            agreement = self._open[topic] = _Agreement(among, participants)
            # who goes later fails it then
            missing = [one for gone in (died, left) for one in gone if one in participants]
        agreement.values[rank] = message["value"]
        if message["collect_at"] is not None:
            agreement.collectors[rank] = tuple(message["collect_at"])
        if among != agreement.among or rank not in agreement.participants:
            # with thousands of ranks the lists are cut
            reason = f"asked among {_told(agreement.among)} and among {_told(among)}"
            return self._fail(topic, message=reason)
        if missing:
            return self._fail(topic, missing=missing)
        if len(agreement.values) < len(agreement.participants):
            return []
        del self._open[topic]
        told = _decision(topic, agreement)
        return [
            (one, told(one))
            for one in sorted(agreement.participants)
            if one not in died and one not in left
        ]

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
            if rank in agreement.participants and rank not in agreement.values:
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
            "missing": runs_of(missing),
            "withdrawn": runs_of(withdrawn),
            "message": message,
        }
        self._failed[topic] = failure
        return [(rank, failure) for rank in sorted(agreement.values)]


def _decision(topic: str, agreement: _Agreement) -> Callable[[int], Message]:
    """Make each rank's message: one for all, and a separate one for a rank that collects."""
    collectors = agreement.collectors
    public = {rank: text for rank, text in agreement.values.items() if rank not in collectors}
    private: dict[int, dict[int, str]] = {}
    for rank, to in collectors.items():
        for collector in to:
            private.setdefault(collector, {})[rank] = agreement.values[rank]
    for_all = _agreed(topic, public)
    for_collectors = {to: _agreed(topic, {**public, **more}) for to, more in private.items()}
    return lambda rank: for_collectors.get(rank, for_all)


def _agreed(topic: str, values: Mapping[int, str]) -> Message:
    by_text: dict[str, list[int]] = {}
    for rank, text in values.items():
        by_text.setdefault(text, []).append(rank)
    return {
        "type": "agreed",
        "topic": topic,
        "values": [[text, runs_of(ranks)] for text, ranks in by_text.items()],
    }


def _told(among: Runs | None) -> str:
    return "all ranks" if among is None else f"ranks {among!s:.200}"
