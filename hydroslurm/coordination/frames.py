"""How messages travel between ranks and the coordinator.

A frame is a length, a MAC and JSON. Each direction has a key of its own, which
:mod:`hydroslurm.coordination.authentication` has agreed on. The MAC covers a counter and a digest
of the body, so a frame that is changed, repeated, left out or moved ends the connection before a
byte of its body is interpreted. A body that goes to thousands of ranks is packed and hashed once.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

from hydroslurm.core.files import parse_json

LIMIT_BYTES = 64 << 20
"""Longest message."""
LIMIT_ITEMS = 1 << 20
"""Most values in a message: bounds the memory that a short text can take."""
LIMIT_DEPTH = 32
MAC_BYTES = 16

_HEAD = struct.Struct(">I")
_OVERHEAD_BYTES = _HEAD.size + MAC_BYTES
"""Before the body of each frame."""
_COUNTED = struct.Struct(">QI")


class BadFrame(Exception):
    """Not what a rank or the coordinator sends; the connection is of no use any more."""


def pack(message: Any) -> bytes:
    """The body of one message.

    Raises:
        TypeError, ValueError: not plain JSON.
    """
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()


def digest(body: bytes) -> bytes:
    """What a MAC covers of a body: independent of the key, so that it is made once for all."""
    return hashlib.blake2b(body, digest_size=32).digest()


class Sealer:
    """Bodies in, frames out, in the order in which they are sent."""

    def __init__(self, key: bytes) -> None:
        self._keyed = _keyed(key)
        self._count = 0

    def seal(self, body: bytes) -> bytes:
        """One body as it travels; raises ValueError for one that no receiver would take."""
        return self.head(len(body), digest(body)) + body

    def head(self, length: int, body_digest: bytes) -> bytes:
        """What precedes a body of so many bytes; raises as :meth:`seal`."""
        if length > LIMIT_BYTES:
            raise ValueError(f"a message of {length} bytes; {LIMIT_BYTES} are allowed")
        mac = _mac(self._keyed, self._count, length, body_digest)
        self._count += 1
        return _HEAD.pack(length) + mac


class Unsealer:
    """Frames as they come in, messages out."""

    def __init__(self, key: bytes) -> None:
        self._keyed = _keyed(key)
        self._count = 0
        self._buffer = bytearray()

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
        source: bytes | bytearray = data
        if self._buffer:  # seldom: nearly every frame comes in one piece, and needs no copy
            self._buffer += data
            source = self._buffer
        found, begin, end = [], 0, len(source)
        while end - begin >= _HEAD.size:
            (length,) = _HEAD.unpack_from(source, begin)
            if length > LIMIT_BYTES:
                raise BadFrame(f"a message of {length} bytes; {LIMIT_BYTES} are allowed")
            at = begin + _OVERHEAD_BYTES
            if end - at < length:
                break
            body = bytes(source[at : at + length])
            mac = _mac(self._keyed, self._count, length, digest(body))
            if not hmac.compare_digest(source[at - MAC_BYTES : at], mac):
                raise BadFrame("the MAC of a message is wrong: it was changed, or is not of a peer")
            self._count += 1
            found.append(body)
            begin = at + length
        if source is data:
            self._buffer += data[begin:]
        else:
            del self._buffer[:begin]
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


def _keyed(key: bytes) -> hashlib.blake2b:
    """A MAC that has taken its key: a copy costs half of taking the key again."""
    return hashlib.blake2b(key=key, digest_size=MAC_BYTES)


def _mac(keyed: hashlib.blake2b, count: int, length: int, body_digest: bytes) -> bytes:
    mac = keyed.copy()
    mac.update(_COUNTED.pack(count, length) + body_digest)
    return mac.digest()
