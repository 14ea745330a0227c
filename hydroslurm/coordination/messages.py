"""The messages between ranks and the coordinator, and the form of each.

A peer has proved that it belongs to the job, but it may be of another release, or broken, and one
bad value would end what serves all others. So each message is checked against the form of its type
before anything reads it; the code behind may rely on the types. The values of an agreement travel
as JSON texts that the coordinator never reads; the rank that receives them checks them.

Lists of ranks travel as runs, ``[[first, last], ...]``: all ranks of a large job are two numbers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Message = dict[str, Any]
Outbox = list[tuple[int, Message]]
"""Rank and message, in the order in which they are to be sent. One object that is for many ranks is
packed once."""
Runs = list[list[int]]
"""Ranks in ascending order, neighbours together."""

Fields = Mapping[str, Any]
"""Name of a field -> its type."""

MAX_RANKS = 1 << 20
MAX_COUNT = 1 << 62
"""Of steps, safe points, rounds, collectives."""
MAX_TEXT = 16384
"""Two paths of the longest, and a sentence."""
MAX_CUT_OFF = 1024
MAX_GROUPS = 4096
"""Process groups of one rank."""
MAX_COLLECTORS = 4
"""Ranks that one value is for where it is not for all: one that decides, and its replacement."""


def runs_of(ranks: Iterable[int]) -> Runs:
    """Ranks in any order, none twice, as they travel."""
    runs: Runs = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def ranks_of(runs: Runs) -> list[int]:
    """The reverse of :func:`runs_of`."""
    return [rank for first, last in runs for rank in range(first, last + 1)]


Rank = Annotated[int, Meta(ge=0, le=MAX_RANKS)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Number = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Counts = Annotated[dict[str, Count], Meta(max_length=MAX_GROUPS)]


class _Runs(list[Any]):
    """Each behind the one before, with a gap: equal sets of ranks are equal texts."""

    def __init__(self, value: Any) -> None:
        super().__init__(msgspec.convert(value, list[tuple[Rank, Rank]]))
        least = 0
        for first, last in self:
            if not least <= first <= last:
                raise ValueError(f"{[first, last]} does not follow in the ranks")
            least = last + 2


class _Values(list[Any]):
    """Of an agreement: pairs of a JSON text and the ranks that have submitted it."""

    def __init__(self, value: Any) -> None:
        pairs = msgspec.convert(value, list[tuple[str, _Runs]], dec_hook=_checked)
        told = sum(last - first + 1 for _, runs in pairs for first, last in runs)
        if told > MAX_RANKS:
            raise ValueError(f"{told} ranks")
        super().__init__(pairs)


Members = Annotated[dict[str, _Runs], Meta(max_length=MAX_GROUPS)]
_ROUND: Fields = {
    "pause": Count,
    "round": Count,
    "exact": bool,
    "wait_ms": Number,
    "of_ranks": list[Rank],
}


class BadMessage(ValueError):
    """Not a valid message; says which field is wrong, and what it was."""


def checker(fields: Mapping[str, Fields]) -> Callable[[Any], Message]:
    """What checks one side's messages: ``type`` of a message -> the fields that it has, all of them
    and no others. It returns a message that has them, and raises BadMessage for any other."""
    kinds = (
        msgspec.defstruct(
            kind, form.items(), tag=kind, tag_field="type", forbid_unknown_fields=True
        )
        for kind, form in fields.items()
    )
    known: Any = functools.reduce(operator.or_, kinds)

    def check(message: Any) -> Message:
        try:
            msgspec.convert(message, known, dec_hook=_checked)
        except (ValueError, RecursionError) as error:
            kind = message.get("type") if type(message) is dict else message
            raise BadMessage(f"{str(kind)[:60]!r}: {error}") from error
        checked: Message = message
        return checked

    return check


def _checked(kind: type[Any], value: Any) -> Any:
    return kind(value)


check_from_rank = checker(
    {
        "join": {
            "incarnation_id": Text,
            "rank": Rank,
            "world_size": Rank,
            "cut_off": Annotated[list[Text], Meta(max_length=MAX_CUT_OFF)],
        },
        "agree": {
            "topic": Text,
            "value": str,
            "among": _Runs | None,
            "collect_at": Annotated[list[Rank], Meta(max_length=MAX_COLLECTORS)] | None,
        },
        "withdraw": {"topic": Text},
        "call_barrier": {"kind": Literal["stop", "save"], "message": Text},
        "propose": {"barrier": Count, "safe_point_index": Count},
        "pause": {},
        "resume": {},
        "counts": {
            "pause": Count,
            "round": Count,
            "groups": Counts | None,
            "in_flight": Count | None,
            "allowance": Count,
        },
        "members": {"groups": Members},
        "leave": {"done": bool},
    }
)

check_from_coordinator = checker(
    {
        "welcome": {},
        "fault": {"message": Text},
        "refused": {"reason": Text, "same_incarnation": bool},
        "all_joined": {"cut_off": list[Text]},
        "ranks_gone": {"died": _Runs, "left": _Runs},
        "agreed": {"topic": Text, "values": _Values},
        "agreement_failed": {
            "topic": Text,
            "missing": _Runs,
            "withdrawn": _Runs,
            "message": Text,
        },
        "barrier_called": {
            "barrier": Count,
            "kind": Literal["stop", "save"],
            "of_rank": Rank,
            "message": Text,
        },
        "barrier_agreed": {"barrier": Count, "safe_point_index": Count},
        "barrier_failed": {"barrier": Count, "missing": _Runs, "finished": bool},
        "describe": {"groups": list[Text]},
        "hold": _ROUND,
        "count": _ROUND,
        "let_through": {**_ROUND, "n": Count},
        "release": _ROUND,
        "all_parked": {**_ROUND, "in_flight": Count | None, "rounds": Count},
    }
)
