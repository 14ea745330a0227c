"""What ranks and the hub say to each other, and that it is just that: checked where it arrives.

A peer has proved that it belongs to the job. It may still be of another release, or out of its
mind, and one bad value would end what serves all others. So each message is held against the form
of its kind before anything reads it; what is behind that may rely on the types. Values of an
agreement are opaque here, and checked by whoever asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_RANKS = 1 << 20
MAX_COUNT = 1 << 62
"""Of steps, places, rounds, collectives."""
MAX_TEXT = 16384
"""Two paths of the longest, and some words."""

Check = Callable[[Any], bool]


class BadMessage(ValueError):
    """A message that is none; says which field is wrong, and what was there."""


def _is_count(value: Any, most: int = MAX_COUNT) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_rank(value: Any) -> bool:
    return _is_count(value, MAX_RANKS)


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT


def _is_any(_: Any) -> bool:
    return True


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _one_of(*words: str) -> Check:
    return lambda value: type(value) is str and value in words


def _list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def _is_who(value: Any) -> bool:
    """The process of a rank. ``cut_off``: what it had begun at hubs that are gone."""
    known = {"pid": _is_count, "host": _is_text, "cut_off": _list_of(_is_text)}
    return type(value) is dict and all(
        name in known and known[name](one) for name, one in value.items()
    )


def _is_groups(value: Any) -> bool:
    """Key of a process group -> its ranks, and how many collectives were issued on it."""
    return type(value) is dict and all(
        type(one) is list and len(one) == 2 and _is_ranks(one[0]) and _is_count(one[1])
        for one in value.values()
    )


def _is_process_table(value: Any) -> bool:
    return type(value) is dict and all(map(_is_who, value.values()))


def _is_values(value: Any) -> bool:
    """Of an agreement: pairs of a rank and what it said."""
    return type(value) is list and all(
        type(one) is list and len(one) == 2 and _is_rank(one[0]) for one in value
    )


_is_ranks = _list_of(_is_rank)
_ROUND: Mapping[str, Check] = {
    "pause": _is_count,
    "round": _is_count,
    "exact": _is_bool,
    "wait_ms": _is_number,
    "of_ranks": _is_ranks,
}

FROM_RANK: Mapping[str, Mapping[str, Check]] = {
    "join": {"life": _is_text, "rank": _is_rank, "world_size": _is_rank, "who": _is_who},
    "agree": {"topic": _is_text, "value": _is_any, "among": _or_none(_is_ranks)},
    "withdraw": {"topic": _is_text},
    "want": {"kind": _one_of("stop", "save"), "words": _is_text},
    "promise": {"meeting": _is_count, "place": _is_count},
    "pause": {},
    "resume": {},
    "counts": {
        "pause": _is_count,
        "round": _is_count,
        "groups": _is_groups,
        "in_flight": _or_none(_is_count),
        "allowance": _is_count,
    },
    "bye": {"done": _is_bool},
}
"""``do`` -> the fields that such a message has, all of them and no others."""

FROM_HUB: Mapping[str, Mapping[str, Check]] = {
    "welcome": {},
    "refused": {"why": _is_text, "ours": _is_bool},
    "everybody": {"ranks": _is_process_table},
    "gone": {"rank": _is_rank, "died": _is_bool},
    "agreed": {"topic": _is_text, "values": _is_values},
    "failed": {
        "topic": _is_text,
        "missing": _is_ranks,
        "withdrawn": _is_ranks,
        "words": _is_text,
    },
    "wanted": {
        "meeting": _is_count,
        "kind": _one_of("stop", "save"),
        "of_rank": _is_rank,
        "words": _is_text,
    },
    "meet": {"meeting": _is_count, "place": _is_count},
    "meeting_failed": {"meeting": _is_count, "missing": _is_ranks, "finished": _is_bool},
    "hold": _ROUND,
    "count": _ROUND,
    "pass": {**_ROUND, "n": _is_count},
    "release": _ROUND,
    "all_parked": {**_ROUND, "in_flight": _is_count, "rounds": _is_count},
}
"""``say`` -> the same of the hub's."""


def check_from_rank(message: Any) -> dict[str, Any]:
    """A message as a rank sends it.

    Raises:
        BadMessage: it is none.
    """
    return _check(message, "do", FROM_RANK)


def check_from_hub(message: Any) -> dict[str, Any]:
    """A message as the hub sends it; raises BadMessage as :func:`check_from_rank` does."""
    return _check(message, "say", FROM_HUB)


def _check(message: Any, verb: str, forms: Mapping[str, Mapping[str, Check]]) -> dict[str, Any]:
    if type(message) is not dict:
        raise BadMessage(f"a message is an object, not {_short(message)}")
    word = message.get(verb)
    form = forms.get(word) if type(word) is str else None
    if form is None:
        raise BadMessage(f"nobody says {_short(word)}")
    if message.keys() != form.keys() | {verb}:
        odd = sorted(message.keys() ^ (form.keys() | {verb}))
        raise BadMessage(f"{word}: missing or unknown: {_short(odd)}")
    for name, check in form.items():
        if not check(message[name]):
            raise BadMessage(f"{word}: {name} is {_short(message[name])}")
    return message


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
