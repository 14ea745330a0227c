"""Agreements as the hub keeps them: all values to all who take part, or one failure. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

Outbox = list[tuple[int, dict[str, Any]]]


@dataclass
class _Open:
    """One that is not decided."""

    among: tuple[int, ...]
    values: dict[int, Any] = field(default_factory=dict)


class Agreements:
    """By topic. One that came about is forgotten, for all have it; one that failed is kept, for
    those who have not asked yet."""

    def __init__(self, world_size: int) -> None:
        self._everybody = tuple(range(world_size))
        self._open: dict[str, _Open] = {}
        self._failed: dict[str, dict[str, Any]] = {}

    def hand_in(
        self, rank: int, topic: str, value: Any, *, among: Any, gone: Collection[int]
    ) -> Outbox:
        """A rank's value. A rank that is gone, or takes part in another circle, fails it."""
        if topic in self._failed:
            return [(rank, self._failed[topic])]
        circle = self._everybody if among is None else tuple(sorted(map(int, among)))
        one = self._open.setdefault(topic, _Open(circle))
        one.values[rank] = value
        if circle != one.among or rank not in circle:
            # of thousands of ranks the lists say no more than their beginnings
            words = f"asked among {list(one.among)!s:.400} and among {list(circle)!s:.400}"
            return self._fail(topic, missing=(), withdrawn=(), words=words)
        missing = [other for other in circle if other in gone and other not in one.values]
        if missing:
            return self._fail(topic, missing=missing, withdrawn=())
        if len(one.values) < len(circle):
            return []
        del self._open[topic]
        values = [[other, one.values[other]] for other in circle]
        told = {"say": "agreed", "topic": topic, "values": values}
        return [(other, told) for other in circle if other not in gone]

    def withdraw(self, rank: int, topic: str) -> Outbox:
        """A rank has given up; too late for one that is decided."""
        one = self._open.get(topic)
        if one is None or rank not in one.values:
            return []
        return self._fail(topic, missing=(), withdrawn=(rank,))

    def without(self, rank: int) -> Outbox:
        """A rank is gone: what waits for its value will never come about."""
        letters: Outbox = []
        for topic, one in list(self._open.items()):
            if rank in one.among and rank not in one.values:
                letters += self._fail(topic, missing=(rank,), withdrawn=())
        return letters

    def _fail(
        self, topic: str, *, missing: Collection[int], withdrawn: Collection[int], words: str = ""
    ) -> Outbox:
        one = self._open.pop(topic)
        told = {
            "say": "failed",
            "topic": topic,
            "missing": sorted(missing),
            "withdrawn": sorted(withdrawn),
            "words": words,
        }
        self._failed[topic] = told
        return [(rank, told) for rank in sorted(one.values)]
