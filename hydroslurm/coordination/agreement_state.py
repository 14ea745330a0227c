"""The agreements of the ranks, as the coordinator sees them. Pure.

Values are texts that are only compared. Ranks that submit the same text are told as runs of ranks,
so an agreement in which all ranks say the same costs each of them one text, however many they are.
Values that differ from rank to rank are told in full to all who get them; where only a rank that
decides needs them, ``collect_at`` spares the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from hydroslurm.coordination.messages import Message, Outbox, Runs, ranks_of, runs_of


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
    """What each rank is told: one message for all, and one of its own for a rank that collects."""
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
