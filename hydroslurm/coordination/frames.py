"""Messages on an authenticated connection: length, MAC, JSON.

Each direction has a key of its own, which :mod:`hydroslurm.coordination.greeting` has agreed on.
The MAC covers a counter, so that a frame that is changed, repeated, left out or moved ends the
connection, before a byte of its body is interpreted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

from hydroslurm.core.files import parse_json

LIMIT_BYTES = 64 << 20
"""Of one message."""
LIMIT_ITEMS = 1 << 20
"""Of the values in one message: bounds what a short text can become in memory."""
LIMIT_DEPTH = 32
MAC_BYTES = 16

_HEAD = struct.Struct(">I")
_COUNTED = struct.Struct(">QI")


class BadFrame(Exception):
    """Not what a rank or a hub sends; the connection is of no use any more."""


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
            BadFrame: longer, deeper or with more values than allowed, not what the other end of
                this connection has sent, or not JSON.
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
            found.append(_unpack(body))
        return found


def _unpack(body: bytes) -> Any:
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
