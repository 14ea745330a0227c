"""Messages between ranks and the coordinator: their forms, and how they travel.

A frame is a length, a MAC and JSON. Each direction has a key of its own, which
:mod:`hydroslurm.coordination.authentication` has agreed on. The MAC covers a counter, so a frame
that is changed, repeated, left out or moved ends the connection before a byte of its body is
interpreted.

A peer has then proved that it belongs to the job, but it may be of another release, or broken, and
one bad value would end what serves all others. So each message is checked against the form of its
type before anything reads it; the code behind may rely on the types. The values of an agreement are
opaque here and checked by whoever asked.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hydroslurm.core.files import parse_json

Message = dict[str, Any]
Outbox = list[tuple[int, Message]]
"""Rank and message, in the order in which they are to be sent."""

MAX_RANKS = 1 << 20
MAX_COUNT = 1 << 62
"""Of steps, safe points, rounds, collectives."""
MAX_TEXT = 16384
"""Two paths of the longest, and a sentence."""
LIMIT_BYTES = 64 << 20
"""Of one message."""
LIMIT_ITEMS = 1 << 20
"""Of the values in one message: bounds what a short text can become in memory."""
LIMIT_DEPTH = 32
MAC_BYTES = 16

_HEAD = struct.Struct(">I")
_COUNTED = struct.Struct(">QI")
_ITEM = struct.Struct(">II")


class BadFrame(Exception):
    """Not what a rank or the coordinator sends; the connection is of no use any more."""


def pack(message: Any) -> bytes:
    """The body of one message.

    Raises:
        TypeError, ValueError: not plain JSON.
    """
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()


class Sealer:
    """Bodies in, frames out, in the order in which they are sent."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def seal(self, body: bytes) -> bytes:
        """One body as it travels; raises ValueError for one that no receiver would take."""
        if len(body) > LIMIT_BYTES:
            raise ValueError(f"a message of {len(body)} bytes; {LIMIT_BYTES} are allowed")
        mac = _mac(self._key, self._count, body)
        self._count += 1
        return b"".join((_HEAD.pack(len(body)), mac, body))


class Unsealer:
    """Frames as they come in, messages out."""

    def __init__(self, key: bytes, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._key = key
        self._count = 0
        self._buffer = bytearray()
        self._limit_bytes = limit_bytes

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete with these bytes.

        Raises:
            BadFrame: as :meth:`bodies` and :func:`unpack`.
        """
        return [unpack(body) for body in self.bodies(data)]

    def bodies(self, data: bytes) -> list[bytes]:
        """The bodies that are complete with these bytes.

        Raises:
            BadFrame: longer than allowed, or not what the other end of this connection has sent.
        """
        self._buffer += data
        found = []
        while len(self._buffer) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._buffer)
            if length > self._limit_bytes:
                raise BadFrame(f"a message of {length} bytes; {self._limit_bytes} are allowed")
            begin = _HEAD.size + MAC_BYTES
            if len(self._buffer) < begin + length:
                break
            mac = bytes(self._buffer[_HEAD.size : begin])
            body = bytes(self._buffer[begin : begin + length])
            del self._buffer[: begin + length]
            if not hmac.compare_digest(mac, _mac(self._key, self._count, body)):
                raise BadFrame("the MAC of a message is wrong: it was changed, or is not of a peer")
            self._count += 1
            found.append(body)
        return found


def unpack(body: bytes) -> Any:
    """The message of one body.

    Raises:
        BadFrame: deeper or with more values than allowed, or not JSON.
    """
    if body.count(b",") >= LIMIT_ITEMS:
        raise BadFrame(f"a message of more than {LIMIT_ITEMS} values")
    try:
        return parse_json(body, max_depth=LIMIT_DEPTH)
    except ValueError as error:
        raise BadFrame(f"not JSON as ranks send it: {error}") from error


def _mac(key: bytes, count: int, body: bytes) -> bytes:
    made = hashlib.blake2b(_COUNTED.pack(count, len(body)), key=key, digest_size=MAC_BYTES)
    made.update(body)
    return made.digest()


# --- what a relay carries


def wrap_up(items: Iterable[tuple[int, bytes]]) -> bytes:
    """The body of one frame from a relay to the coordinator: bodies of ranks, in the order in which
    they came. An empty one says that the rank's connection has ended."""
    return b"".join(part for rank, body in items for part in (_ITEM.pack(rank, len(body)), body))


def unwrap_up(body: bytes) -> list[tuple[int, bytes]]:
    """The reverse of :func:`wrap_up`; raises BadFrame."""
    found, at = [], 0
    while at < len(body):
        if len(body) - at < _ITEM.size:
            raise BadFrame("a frame of a relay ends within an item")
        rank, length = _ITEM.unpack_from(body, at)
        at += _ITEM.size
        if len(body) - at < length:
            raise BadFrame("a frame of a relay ends within an item")
        found.append((rank, body[at : at + length]))
        at += length
    return found


def wrap_down(ranks: Sequence[int], body: bytes) -> bytes:
    """The body of one frame from the coordinator to a relay: one body for several ranks. An empty
    one says that their connections are to be closed."""
    return struct.pack(f">I{len(ranks)}I", len(ranks), *ranks) + body


def unwrap_down(body: bytes) -> tuple[tuple[int, ...], bytes]:
    """The reverse of :func:`wrap_down`; raises BadFrame."""
    try:
        (count,) = _HEAD.unpack_from(body)
        ranks = struct.unpack_from(f">{count}I", body, _HEAD.size)
    except (struct.error, MemoryError) as error:
        raise BadFrame(f"not a frame for a relay: {error}") from error
    return ranks, body[_HEAD.size * (1 + count) :]


# --- the form of each message

Check = Callable[[Any], bool]


class BadMessage(ValueError):
    """Not a valid message; says which field is wrong, and what it was."""


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


def _is_process(value: Any) -> bool:
    """The process of a rank. ``cut_off``: what it had started at coordinators that are gone."""
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
    return type(value) is dict and all(map(_is_process, value.values()))


def _is_values(value: Any) -> bool:
    """Of an agreement: pairs of a rank and its value."""
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

TO_RELAY: Mapping[str, Mapping[str, Check]] = {
    "reach": {"incarnation_id": _is_text, "rank": _is_rank, "host": _is_text, "is_near": _is_bool},
}
"""What a rank says first to the relay of its node, which passes on everything else."""

FROM_RANK: Mapping[str, Mapping[str, Check]] = {
    "relay": {"incarnation_id": _is_text},
    "join": {
        "incarnation_id": _is_text,
        "rank": _is_rank,
        "world_size": _is_rank,
        "process": _is_process,
    },
    "agree": {"topic": _is_text, "value": _is_any, "among": _or_none(_is_ranks)},
    "withdraw": {"topic": _is_text},
    "call_barrier": {"kind": _one_of("stop", "save"), "message": _is_text},
    "propose": {"barrier": _is_count, "safe_point_index": _is_count},
    "pause": {},
    "resume": {},
    "counts": {
        "pause": _is_count,
        "round": _is_count,
        "groups": _is_groups,
        "in_flight": _or_none(_is_count),
        "allowance": _is_count,
    },
    "leave": {"done": _is_bool},
}
"""``type`` -> the fields that such a message has, all of them and no others."""

FROM_COORDINATOR: Mapping[str, Mapping[str, Check]] = {
    "reached": {},
    "welcome": {},
    "refused": {"reason": _is_text, "same_incarnation": _is_bool},
    "all_joined": {"ranks": _is_process_table},
    "rank_gone": {"rank": _is_rank, "died": _is_bool},
    "agreed": {"topic": _is_text, "values": _is_values},
    "agreement_failed": {
        "topic": _is_text,
        "missing": _is_ranks,
        "withdrawn": _is_ranks,
        "message": _is_text,
    },
    "barrier_called": {
        "barrier": _is_count,
        "kind": _one_of("stop", "save"),
        "of_rank": _is_rank,
        "message": _is_text,
    },
    "barrier_agreed": {"barrier": _is_count, "safe_point_index": _is_count},
    "barrier_failed": {"barrier": _is_count, "missing": _is_ranks, "finished": _is_bool},
    "hold": _ROUND,
    "count": _ROUND,
    "let_through": {**_ROUND, "n": _is_count},
    "release": _ROUND,
    "all_parked": {**_ROUND, "in_flight": _is_count, "rounds": _is_count},
}
"""The same of the coordinator's messages."""


def check_from_rank(message: Any) -> Message:
    """A message as a rank sends it.

    Raises:
        BadMessage: it is not one.
    """
    return _check(message, FROM_RANK)


def check_to_relay(message: Any) -> Message:
    """The first message of a rank to a relay; raises as :func:`check_from_rank`."""
    return _check(message, TO_RELAY)


def check_from_coordinator(message: Any) -> Message:
    """A message as the coordinator sends it; raises as :func:`check_from_rank`."""
    return _check(message, FROM_COORDINATOR)


def _check(message: Any, forms: Mapping[str, Mapping[str, Check]]) -> Message:
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
