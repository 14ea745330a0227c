"""How a rank and the hub prove to each other that they are of one job step. Pure but for MUNGE.

Both know a random key of 32 bytes, or the hub gives it to the rank in a credential of MUNGE's
that only the same user can read. Nothing that arrives is interpreted before its sender has proved
itself, but for these fields of fixed form:

    rank -> hub   magic, mode, nonce, credential (mode ``m``: names the attempt and the nonce)
    hub -> rank   nonce, credential (mode ``m``: names the rank's nonce, and holds the key), proof
    rank -> hub   proof

A proof is an HMAC-SHA256 of all that was said before, with the speaker's name, under the key. The
keys of the frames that follow are made in the same way, one for each direction. Whoever only passes
the bytes on learns nothing and can change nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
from dataclasses import dataclass

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
    """The other end is no rank or hub of this job step."""


@dataclass(frozen=True)
class Channel:
    """What both ends know after the greeting.

    Attributes:
        to_hub, to_rank: keys of the frames of each direction.
        rest: bytes that followed the greeting.
    """

    to_hub: bytes
    to_rank: bytes
    rest: bytes = b""


class RankGreeting:
    """The rank's end.

    Attributes:
        hello: what to send first.
        key: the key; known from the beginning, or from the hub's answer on.
        channel: None until the hub has proved itself.
    """

    def __init__(self, *, attempt: str, key: bytes | None, munge: Munge | None) -> None:
        """
        Args:
            attempt: names the ranks that belong together, to a hub that gives the key by MUNGE.
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
        self.channel: Channel | None = None
        self._buffer = b""

    def feed(self, data: bytes) -> bytes | None:
        """Take what the hub says; our proof, once the hub has given its own.

        Raises:
            GreetingFailed: it is not the hub of this attempt.
            MungeError: as for :meth:`Munge.decode`.
        """
        self._buffer += data
        head = _NONCE_BYTES + _LENGTH.size
        if len(self._buffer) < head:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, _NONCE_BYTES)
        if length > CREDENTIAL_BYTES:
            raise GreetingFailed("not the hub of this job: its credential is too long")
        end = head + length
        if len(self._buffer) < end + _PROOF_BYTES:
            return None
        answer, proof = self._buffer[:end], self._buffer[end : end + _PROOF_BYTES]
        if self.key is None:
            self.key = self._given(answer[head:])
        said = self.hello + answer
        if not hmac.compare_digest(proof, _prove(self.key, b"hub", said)):
            raise GreetingFailed("not the hub of this job: it does not know the key")
        rest = self._buffer[end + _PROOF_BYTES :]
        self.channel = _channel(self.key, said, rest)
        return _prove(self.key, b"rank", said)

    def _given(self, credential: bytes) -> bytes:
        assert self._munge is not None
        payload, uid = self._munge.decode(credential)
        start = _KEY + self._bond
        if uid != os.getuid() or payload[: len(start)] != start:
            raise GreetingFailed(f"not the hub of this job: its credential is of uid {uid}")
        key = payload[len(start) :]
        if len(key) != KEY_BYTES:
            raise GreetingFailed("not the hub of this job: it gives no key")
        return key


class HubGreeting:
    """The hub's end of one connection.

    ``feed`` takes bytes; once ``hello`` is there, ``answer`` makes what is to be sent, which may
    take the millisecond that MUNGE needs; then ``feed`` takes the proof.

    Attributes:
        hello: of the rank, when it is complete.
        channel: None until the rank has proved itself.
    """

    def __init__(self) -> None:
        self.hello: bytes | None = None
        self.channel: Channel | None = None
        self._said = b""
        self._key = b""
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        """Take what the rank says.

        Raises:
            GreetingFailed: it is no rank of this job step.
        """
        self._buffer += data
        if self.hello is None:
            self._read_hello()
        if not self._said:
            if self.hello is not None and self._buffer:
                raise GreetingFailed("goes on before it was answered")
        elif len(self._buffer) >= _PROOF_BYTES and self.channel is None:
            proof, rest = self._buffer[:_PROOF_BYTES], self._buffer[_PROOF_BYTES:]
            if not hmac.compare_digest(proof, _prove(self._key, b"rank", self._said)):
                raise GreetingFailed("does not know the key")
            self.channel = _channel(self._key, self._said, rest)

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
        self._key, self._said = key, self.hello + answer
        return answer + _prove(key, b"hub", self._said)


def derive(key: bytes, purpose: str) -> bytes:
    """Another key of 32 bytes, from which nobody can tell the first."""
    return hmac.digest(key, b"derive\0" + purpose.encode(), "sha256")


def _bond(attempt: str, nonce: bytes) -> bytes:
    return hashlib.sha256(nonce + attempt.encode()).digest()


def _prove(key: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(key, who + b"\0" + said, "sha256")


def _channel(key: bytes, said: bytes, rest: bytes) -> Channel:
    return Channel(_prove(key, b"to hub", said), _prove(key, b"to rank", said), rest)
