"""The messages between ranks and the coordinator, and the form of each.

A peer has proved that it belongs to the job, but it may be of another release, or broken, and one
bad value would end what serves all others. So each message is checked against the form of its type
before anything reads it; the code behind may rely on the types. The values of an agreement travel
as JSON texts that the coordinator never reads; whoever asked for them checks them.

Lists of ranks travel as runs, ``[[first, last], ...]``: all ranks of a large job are two numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Message = dict[str, Any]
Outbox = list[tuple[int, Message]]
"""Rank and message, in the order in which they are to be sent. One object that is for many ranks is
packed once."""
Runs = list[list[int]]
"""Ranks in ascending order, neighbours together."""

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


Check = Callable[[Any], bool]


class BadMessage(ValueError):
    """Not a valid message; says which field is wrong, and what it was."""


def is_count(value: Any, most: int = MAX_COUNT) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_rank(value: Any) -> bool:
    return is_count(value, MAX_RANKS)


def is_bool(value: Any) -> bool:
    return type(value) is bool


def is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT


def _is_str(value: Any) -> bool:
    return type(value) is str


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _one_of(*words: str) -> Check:
    return lambda value: type(value) is str and value in words


def list_of(check: Check, most: int = MAX_COUNT) -> Check:
    return lambda value: type(value) is list and len(value) <= most and all(map(check, value))


def _by_group(check: Check) -> Check:
    """Key of a process group -> a value."""

    def check_all(value: Any) -> bool:
        return type(value) is dict and len(value) <= MAX_GROUPS and all(map(check, value.values()))

    return check_all


def _is_runs(value: Any) -> bool:
    """Each behind the one before, with a gap: equal sets of ranks are equal texts."""
    if type(value) is not list:
        return False
    least = 0
    for run in value:
        if type(run) is not list or len(run) != 2 or not all(map(_is_rank, run)):
            return False
        first, last = run
        if not least <= first <= last:
            return False
        least = last + 2
    return True


def _is_values(value: Any) -> bool:
    """Of an agreement: pairs of a JSON text and the ranks that have submitted it."""
    if type(value) is not list:
        return False
    if not all(
        type(one) is list and len(one) == 2 and type(one[0]) is str and _is_runs(one[1])
        for one in value
    ):
        return False
    told = sum(last - first + 1 for _, runs in value for first, last in runs)
    return bool(told <= MAX_RANKS)


_is_ranks = list_of(_is_rank)
_ROUND: Mapping[str, Check] = {
    "pause": is_count,
    "round": is_count,
    "exact": is_bool,
    "wait_ms": is_number,
    "of_ranks": _is_ranks,
}

FROM_RANK: Mapping[str, Mapping[str, Check]] = {
    "join": {
        "incarnation_id": is_text,
        "rank": _is_rank,
        "world_size": _is_rank,
        "cut_off": list_of(is_text, most=MAX_CUT_OFF),
    },
    "agree": {
        "topic": is_text,
        "value": _is_str,
        "among": _or_none(_is_runs),
        "collect_at": _or_none(list_of(_is_rank, most=MAX_COLLECTORS)),
    },
    "withdraw": {"topic": is_text},
    "call_barrier": {"kind": _one_of("stop", "save"), "message": is_text},
    "propose": {"barrier": is_count, "safe_point_index": is_count},
    "pause": {},
    "resume": {},
    "counts": {
        "pause": is_count,
        "round": is_count,
        "groups": _or_none(_by_group(is_count)),
        "in_flight": _or_none(is_count),
        "allowance": is_count,
    },
    "members": {"groups": _by_group(_is_runs)},
    "leave": {"done": is_bool},
}
"""``type`` -> the fields that such a message has, all of them and no others."""

FROM_COORDINATOR: Mapping[str, Mapping[str, Check]] = {
    "welcome": {},
    "fault": {"message": is_text},
    "refused": {"reason": is_text, "same_incarnation": is_bool},
    "all_joined": {"cut_off": list_of(is_text)},
    "ranks_gone": {"died": _is_runs, "left": _is_runs},
    "agreed": {"topic": is_text, "values": _is_values},
    "agreement_failed": {
        "topic": is_text,
        "missing": _is_runs,
        "withdrawn": _is_runs,
        "message": is_text,
    },
    "barrier_called": {
        "barrier": is_count,
        "kind": _one_of("stop", "save"),
        "of_rank": _is_rank,
        "message": is_text,
    },
    "barrier_agreed": {"barrier": is_count, "safe_point_index": is_count},
    "barrier_failed": {"barrier": is_count, "missing": _is_runs, "finished": is_bool},
    "describe": {"groups": list_of(is_text)},
    "hold": _ROUND,
    "count": _ROUND,
    "let_through": {**_ROUND, "n": is_count},
    "release": _ROUND,
    "all_parked": {**_ROUND, "in_flight": _or_none(is_count), "rounds": is_count},
}
"""The same of the coordinator's messages."""


def check_from_rank(message: Any) -> Message:
    """A message as a rank sends it.

    Raises:
        BadMessage: it is not one.
    """
    return check_form(message, FROM_RANK)


def check_from_coordinator(message: Any) -> Message:
    """A message as the coordinator sends it; raises as :func:`check_from_rank`."""
    return check_form(message, FROM_COORDINATOR)


def check_form(message: Any, forms: Mapping[str, Mapping[str, Check]]) -> Message:
    """A message of one of these forms: ``type`` -> what each of its fields has to pass.

    Raises:
        BadMessage: it is of none.
    """
    if type(message) is not dict:
        raise BadMessage(f"a message is an object, not {_short(message)}")
    kind = message.get("type")
    form = forms.get(kind) if type(kind) is str else None
    if form is None:
        raise BadMessage(f"there is no message {_short(kind)}")
    if message.keys() != form.keys() | {"type"}:
        odd = sorted(message.keys() ^ (form.keys() | {"type"}))
        raise BadMessage(f"{kind}: missing or unknown: {_short(odd)}")
    for name, check in form.items():
        if not check(message[name]):
            raise BadMessage(f"{kind}: {name} is {_short(message[name])}")
    return message


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
