"""Values on a socket: four bytes of length, then JSON."""

from __future__ import annotations

import json
import struct
from typing import Any

LIMIT_BYTES = 64 << 20
"""Of one message. What ranks tell each other is small; this only bounds what a stranger can ask the
hub to keep."""

_HEAD = struct.Struct(">I")


class BadFrame(Exception):
    """Not what a rank or a hub sends."""


def pack(message: Any) -> bytes:
    """One message as it travels.

    Raises:
        TypeError, ValueError: not plain JSON.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEAD.pack(len(body)) + body


class Unpacker:
    """Bytes as they come in, messages out."""

    def __init__(self, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._buffer = bytearray()
        self._limit_bytes = limit_bytes

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete with these bytes.

        Raises:
            BadFrame: longer than allowed, or not JSON; the connection is of no use any more.
        """
        self._buffer += data
        found = []
        while len(self._buffer) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._buffer)
            if length > self._limit_bytes:
                raise BadFrame(f"a message of {length} bytes; {self._limit_bytes} are allowed")
            end = _HEAD.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            try:
                found.append(json.loads(body))
            except ValueError as error:
                raise BadFrame(f"not JSON: {error}") from error
        return found
