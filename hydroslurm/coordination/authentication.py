"""How a rank and the coordinator prove to each other that they belong to one job step. Pure, but
for MUNGE.

Both know a random key of 32 bytes, or the coordinator gives it to the rank in a MUNGE credential
that only the same user can read. Nothing that arrives is interpreted before its sender has
authenticated, except these fields of fixed form:

    rank -> coordinator   magic, mode, nonce, credential (mode ``m``: names the attempt and the
                          nonce)
    coordinator -> rank   nonce, credential (mode ``m``: names the rank's nonce and holds the key),
                          proof
    rank -> coordinator   proof

A proof is an HMAC-SHA256, under the key, of the sender's name and everything sent before. The keys
of the frames that follow are derived in the same way, one for each direction. Whoever only relays
the bytes learns nothing and can change nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydroslurm.slurm.munge import Munge

KEY_BYTES = 32
MAGIC = b"hydroslurm 1\n"
BY_KEY, BY_MUNGE = b"k", b"m"
CREDENTIAL_BYTES = 4096
"""At most; ours have about 400."""

_NONCE_BYTES = _PROOF_BYTES = 32
_LENGTH = struct.Struct(">H")
_HELLO_BYTES = len(MAGIC) + 1 + _NONCE_BYTES + _LENGTH.size
_JOIN, _KEY = b"hydroslurm rank\0", b"hydroslurm key\0"


class GreetingFailed(Exception):
    """The other end is not a rank or the coordinator of this job step."""


@dataclass(frozen=True)
class Session:
    """What both ends know after the greeting.

    Attributes:
        to_coordinator, to_rank: keys of the frames of each direction.
        rest: bytes that followed the greeting.
    """

    to_coordinator: bytes
    to_rank: bytes
    rest: bytes = b""


class RankGreeting:
    """The rank's end.

    Attributes:
        hello: what to send first.
        key: known from the beginning, or from the coordinator's answer on.
        session: None until the coordinator has authenticated.
    """

    def __init__(self, *, attempt: str, key: bytes | None, munge: Munge | None) -> None:
        """
        Args:
            attempt: names the ranks that belong together, to a coordinator that gives the key by
                MUNGE.
            key: None to be given it.
            munge: needed without a key.

        Raises:
            MungeError: it does not answer.
        """
        assert key is not None or munge is not None
        self.key = key
        self._munge = munge
        mode, nonce, credential = BY_KEY, secrets.token_bytes(_NONCE_BYTES), b""
        self._bond = _bond(attempt, nonce)
        if key is None:
            assert munge is not None
            mode, credential = BY_MUNGE, munge.encode(_JOIN + self._bond)
        self.hello = MAGIC + mode + nonce + _LENGTH.pack(len(credential)) + credential
        self.session: Session | None = None
        self._buffer = b""

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes of the coordinator; return our proof once it has given its own.

        Raises:
            GreetingFailed: it is not the coordinator of this attempt.
            MungeError: as for :meth:`Munge.decode`.
        """
        self._buffer += data
        head = _NONCE_BYTES + _LENGTH.size
        if len(self._buffer) < head:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, _NONCE_BYTES)
        if length > CREDENTIAL_BYTES:
            raise GreetingFailed("not the coordinator of this job: its credential is too long")
        end = head + length
        if len(self._buffer) < end + _PROOF_BYTES:
            return None
        answer, proof = self._buffer[:end], self._buffer[end : end + _PROOF_BYTES]
        if self.key is None:
            self.key = self._given(answer[head:])
        sent = self.hello + answer
        if not hmac.compare_digest(proof, _prove(self.key, b"coordinator", sent)):
            raise GreetingFailed("not the coordinator of this job: it does not know the key")
        rest = self._buffer[end + _PROOF_BYTES :]
        self.session = _session(self.key, sent, rest)
        return _prove(self.key, b"rank", sent)

    def _given(self, credential: bytes) -> bytes:
        assert self._munge is not None
        payload, uid = self._munge.decode(credential)
        start = _KEY + self._bond
        if uid != os.getuid() or payload[: len(start)] != start:
            raise GreetingFailed(f"not the coordinator of this job: its credential is of uid {uid}")
        key = payload[len(start) :]
        if len(key) != KEY_BYTES:
            raise GreetingFailed("not the coordinator of this job: it gives no key")
        return key


class CoordinatorGreeting:
    """The coordinator's end of one connection.

    ``feed`` takes bytes; once ``hello`` is there, ``answer`` makes what is to be sent, which may
    take the millisecond that MUNGE needs; then ``feed`` takes the proof.

    Attributes:
        hello: of the rank, when it is complete.
        session: None until the rank has authenticated.
    """

    def __init__(self) -> None:
        self.hello: bytes | None = None
        self.session: Session | None = None
        self._sent = b""
        self._key = b""
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        """Take bytes of the rank.

        Raises:
            GreetingFailed: it is no rank of this job step.
        """
        self._buffer += data
        if self.hello is None:
            self._read_hello()
        if not self._sent:
            if self.hello is not None and self._buffer:
                raise GreetingFailed("continues before it was answered")
        elif len(self._buffer) >= _PROOF_BYTES and self.session is None:
            proof, rest = self._buffer[:_PROOF_BYTES], self._buffer[_PROOF_BYTES:]
            if not hmac.compare_digest(proof, _prove(self._key, b"rank", self._sent)):
                raise GreetingFailed("does not know the key")
            self.session = _session(self._key, self._sent, rest)

    @property
    def asks_munge(self) -> bool:
        """Whether the rank has no key, so that an answer needs MUNGE."""
        assert self.hello is not None
        return self.hello[len(MAGIC) : len(MAGIC) + 1] == BY_MUNGE

    def _read_hello(self) -> None:
        start = self._buffer[: len(MAGIC)]
        if start != MAGIC[: len(start)]:
            raise GreetingFailed("speaks another protocol")
        if len(self._buffer) < _HELLO_BYTES:
            return
        (length,) = _LENGTH.unpack_from(self._buffer, _HELLO_BYTES - _LENGTH.size)
        if length > CREDENTIAL_BYTES:
            raise GreetingFailed("its credential is too long")
        end = _HELLO_BYTES + length
        if len(self._buffer) >= end:
            self.hello, self._buffer = self._buffer[:end], self._buffer[end:]

    def answer(self, key: bytes, *, attempt: str, munge: Munge | None) -> bytes:
        """What is to be sent for ``hello``; in any thread.

        Args:
            key: of this attempt.
            munge: None to refuse ranks that have no key.

        Raises:
            GreetingFailed, MungeError: it may not be given the key.
        """
        assert self.hello is not None
        mode = self.hello[len(MAGIC) : len(MAGIC) + 1]
        nonce = self.hello[len(MAGIC) + 1 : _HELLO_BYTES - _LENGTH.size]
        credential = b""
        if mode == BY_MUNGE:
            if munge is None:
                raise GreetingFailed("has no key, and there is no MUNGE here")
            bond = _bond(attempt, nonce)
            payload, uid = munge.decode(self.hello[_HELLO_BYTES:])
            if uid != os.getuid() or not hmac.compare_digest(payload, _JOIN + bond):
                raise GreetingFailed(f"its credential is of uid {uid}, or of another attempt")
            credential = munge.encode(_KEY + bond + key)
        elif mode != BY_KEY:
            raise GreetingFailed("speaks another protocol")
        own = secrets.token_bytes(_NONCE_BYTES)
        answer = own + _LENGTH.pack(len(credential)) + credential
        self._key, self._sent = key, self.hello + answer
        return answer + _prove(key, b"coordinator", self._sent)


def derive(key: bytes, purpose: str) -> bytes:
    """Another key of 32 bytes, from which nobody can tell the first."""
    return hmac.digest(key, b"derive\0" + purpose.encode(), "sha256")


def _bond(attempt: str, nonce: bytes) -> bytes:
    return hashlib.sha256(nonce + attempt.encode()).digest()


def _prove(key: bytes, who: bytes, sent: bytes) -> bytes:
    return hmac.digest(key, who + b"\0" + sent, "sha256")


def _session(key: bytes, sent: bytes, rest: bytes) -> Session:
    return Session(_prove(key, b"to coordinator", sent), _prove(key, b"to rank", sent), rest)
