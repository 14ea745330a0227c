"""How a rank and the coordinator prove to each other that they belong to one job step, and how
messages then travel between them. Pure.

Both know a random key of 32 bytes, or the coordinator gives it to the rank in a MUNGE credential
that only the same user can read (:mod:`hydroslurm.coordination.secret` makes and reads it). Nothing
that arrives is interpreted before its sender has authenticated, except these fields of fixed form:

    rank -> coordinator   magic, mode, nonce, local rank
    coordinator -> rank   nonce, credential (mode ``m``: holds the key), proof
    rank -> coordinator   proof

The credential was made before the coordinator began to listen, so that a stranger's connection
costs it a hash and never a question to munged. The nonces make each proof good for one connection.

A proof is an HMAC-SHA256, under the key, of the sender's name and everything sent before. The keys
of the frames that follow are derived in the same way, one for each direction. A relay between them
learns nothing and can change nothing.

A frame is a length, a MAC and JSON. The MAC covers a counter and a digest of the body, so a frame
that is changed, repeated, left out or moved ends the connection before a byte of its body is
interpreted. A body that goes to thousands of ranks is packed and hashed once.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from hydroslurm.core.files import parse_json

KEY_BYTES = 32
MAGIC = b"hydroslurm 1\n"
BY_KEY, BY_MUNGE = b"k", b"m"
CREDENTIAL_BYTES = 4096
"""At most; ours have about 400."""

_NONCE_BYTES = _PROOF_BYTES = 32
_LENGTH = struct.Struct(">H")


class GreetingFailed(Exception):
    """The other end is not a rank or the coordinator of this job step."""


@dataclass(frozen=True, eq=False)
class Session:
    """What one end has after the greeting.

    Attributes:
        sealer, unsealer: for what it sends, and for what arrives.
    """

    key: bytes
    sealer: Sealer
    unsealer: Unsealer


_Steps = Generator[tuple[bytes, int], bytes, tuple[bytes, Session]]
"""One end's part: yields what it sends and how many bytes it takes next; returns what it sends
last, and its session."""


class Greeting:
    """One end of a connection that greets.

    Attributes:
        hello: what to send first; empty for the coordinator.
        session: None until the other end has authenticated.
        rest: bytes that have arrived behind the greeting.
    """

    def __init__(self, steps: _Steps) -> None:
        """Internal: use :meth:`of_rank` or :meth:`of_coordinator`."""
        self.session: Session | None = None
        self.rest = b""
        self._steps = steps
        self.hello, self._wanted_bytes = next(steps)

    @classmethod
    def of_rank(
        cls,
        *,
        key: bytes | None,
        open_credential: Callable[[bytes], bytes],
        local_rank: int = 0,
    ) -> Greeting:
        """
        Args:
            key: None to be given it.
            open_credential: returns the key in the coordinator's credential, or raises what
                :meth:`feed` raises.
            local_rank: ranks of one node are given different credentials.
        """
        mode, nonce = BY_KEY if key else BY_MUNGE, secrets.token_bytes(_NONCE_BYTES)
        hello = MAGIC + mode + nonce + _LENGTH.pack(local_rank % (1 << 16))
        return cls(_as_rank(hello, key, open_credential))

    @classmethod
    def of_coordinator(cls, key: bytes, credentials: Sequence[bytes]) -> Greeting:
        """
        Args:
            key: of this attempt.
            credentials: that hold it; none to refuse ranks that have no key.
        """
        return cls(_as_coordinator(key, credentials))

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the other end; return what to answer, which may be nothing.

        Raises:
            GreetingFailed: it is not the coordinator, or no rank, of this attempt.
            MungeError: as for :meth:`Munge.decode`.
        """
        self.rest += data
        answer = b""
        while self.session is None and len(self.rest) >= self._wanted_bytes:
            taken, self.rest = self.rest[: self._wanted_bytes], self.rest[self._wanted_bytes :]
            try:
                more, self._wanted_bytes = self._steps.send(taken)
            except StopIteration as end:
                more, self.session = end.value
            answer += more
        return answer


def _as_rank(hello: bytes, key: bytes | None, open_credential: Callable[[bytes], bytes]) -> _Steps:
    head = yield hello, _NONCE_BYTES + _LENGTH.size
    (length,) = _LENGTH.unpack_from(head, _NONCE_BYTES)
    if length > CREDENTIAL_BYTES:
        raise GreetingFailed("not the coordinator of this job: its credential is too long")
    tail = yield b"", length + _PROOF_BYTES
    credential, proof = tail[:length], tail[length:]
    if key is None:
        key = open_credential(credential)
    sent = hello + head + credential
    if not hmac.compare_digest(proof, _prove(key, b"coordinator", sent)):
        raise GreetingFailed("not the coordinator of this job: it does not know the key")
    to_coordinator, to_rank = _frame_keys(key, sent)
    return _prove(key, b"rank", sent), Session(key, Sealer(to_coordinator), Unsealer(to_rank))


def _as_coordinator(key: bytes, credentials: Sequence[bytes]) -> _Steps:
    if (yield b"", len(MAGIC)) != MAGIC:
        raise GreetingFailed("speaks another protocol")
    hello = yield b"", 1 + _NONCE_BYTES + _LENGTH.size
    mode, credential = hello[:1], b""
    if mode == BY_MUNGE:
        if not credentials:
            raise GreetingFailed("has no key, and there is no MUNGE here")
        (local_rank,) = _LENGTH.unpack_from(hello, 1 + _NONCE_BYTES)
        credential = credentials[local_rank % len(credentials)]
    elif mode != BY_KEY:
        raise GreetingFailed("speaks another protocol")
    answer = secrets.token_bytes(_NONCE_BYTES) + _LENGTH.pack(len(credential)) + credential
    sent = MAGIC + hello + answer
    proof = yield answer + _prove(key, b"coordinator", sent), _PROOF_BYTES
    if not hmac.compare_digest(proof, _prove(key, b"rank", sent)):
        raise GreetingFailed("does not know the key")
    to_coordinator, to_rank = _frame_keys(key, sent)
    return b"", Session(key, Sealer(to_rank), Unsealer(to_coordinator))


def derive(key: bytes, purpose: str) -> bytes:
    """Derive another key of 32 bytes, which does not reveal the first."""
    return hmac.digest(key, b"derive\0" + purpose.encode(), "sha256")


def _prove(key: bytes, who: bytes, sent: bytes) -> bytes:
    return hmac.digest(key, who + b"\0" + sent, "sha256")


def _frame_keys(key: bytes, sent: bytes) -> tuple[bytes, bytes]:
    """Of the frames to the coordinator, and of those to the rank."""
    return _prove(key, b"to coordinator", sent), _prove(key, b"to rank", sent)


# --- frames
# ------------------------------------------------------------------------------------------------


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
