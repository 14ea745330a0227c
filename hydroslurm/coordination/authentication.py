"""How a rank and the coordinator prove to each other that they belong to one job step. Pure.

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
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydroslurm.coordination.frames import Sealer, Unsealer

KEY_BYTES = 32
MAGIC = b"hydroslurm 1\n"
BY_KEY, BY_MUNGE = b"k", b"m"
CREDENTIAL_BYTES = 4096
"""At most; ours have about 400."""

_NONCE_BYTES = _PROOF_BYTES = 32
_LENGTH = struct.Struct(">H")
_HELLO_BYTES = len(MAGIC) + 1 + _NONCE_BYTES + _LENGTH.size


class GreetingFailed(Exception):
    """The other end is not a rank or the coordinator of this job step."""


@dataclass(frozen=True, eq=False)
class Session:
    """What one end has after the greeting.

    Attributes:
        sealer, unsealer: for what it sends, and for what arrives.
        rest: bytes that followed the greeting.
    """

    sealer: Sealer
    unsealer: Unsealer
    rest: bytes = b""


class RankGreeting:
    """The rank's end.

    Attributes:
        hello: what to send first.
        key: known from the beginning, or from the coordinator's credential on.
        session: None until the coordinator has authenticated.
    """

    def __init__(
        self, *, key: bytes | None, open_credential: Callable[[bytes], bytes], local_rank: int = 0
    ) -> None:
        """
        Args:
            key: None to be given it.
            open_credential: returns the key in the coordinator's credential, or raises what
                :meth:`feed` raises.
            local_rank: ranks of one node are given different credentials.
        """
        self.key = key
        self._open_credential = open_credential
        mode, nonce = BY_KEY if key else BY_MUNGE, secrets.token_bytes(_NONCE_BYTES)
        self.hello = MAGIC + mode + nonce + _LENGTH.pack(local_rank % (1 << 16))
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
            self.key = self._open_credential(answer[head:])
        sent = self.hello + answer
        if not hmac.compare_digest(proof, _prove(self.key, b"coordinator", sent)):
            raise GreetingFailed("not the coordinator of this job: it does not know the key")
        rest = self._buffer[end + _PROOF_BYTES :]
        to_coordinator, to_rank = _frame_keys(self.key, sent)
        self.session = Session(Sealer(to_coordinator), Unsealer(to_rank), rest)
        return _prove(self.key, b"rank", sent)


class CoordinatorGreeting:
    """The coordinator's end of one connection.

    Attributes:
        session: None until the rank has authenticated.
    """

    def __init__(self, key: bytes, credentials: Sequence[bytes]) -> None:
        """
        Args:
            key: of this attempt.
            credentials: that hold it; none to refuse ranks that have no key.
        """
        self.session: Session | None = None
        self._key = key
        self._credentials = credentials
        self._sent = b""
        self._buffer = b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the rank; return what to answer, which may be nothing.

        Raises:
            GreetingFailed: it is no rank of this job step.
        """
        self._buffer += data
        if not self._sent:
            return self._answer()
        if len(self._buffer) >= _PROOF_BYTES and self.session is None:
            proof, rest = self._buffer[:_PROOF_BYTES], self._buffer[_PROOF_BYTES:]
            if not hmac.compare_digest(proof, _prove(self._key, b"rank", self._sent)):
                raise GreetingFailed("does not know the key")
            to_coordinator, to_rank = _frame_keys(self._key, self._sent)
            self.session = Session(Sealer(to_rank), Unsealer(to_coordinator), rest)
        return b""

    def _answer(self) -> bytes:
        hello, self._buffer = self._buffer, b""
        if hello[: len(MAGIC)] != MAGIC[: len(hello)]:
            raise GreetingFailed("speaks another protocol")
        if len(hello) < _HELLO_BYTES:
            self._buffer = hello
            return b""
        if len(hello) > _HELLO_BYTES:
            raise GreetingFailed("continues before it was answered")
        mode, credential = hello[len(MAGIC) : len(MAGIC) + 1], b""
        if mode == BY_MUNGE:
            if not self._credentials:
                raise GreetingFailed("has no key, and there is no MUNGE here")
            (local_rank,) = _LENGTH.unpack_from(hello, _HELLO_BYTES - _LENGTH.size)
            credential = self._credentials[local_rank % len(self._credentials)]
        elif mode != BY_KEY:
            raise GreetingFailed("speaks another protocol")
        answer = secrets.token_bytes(_NONCE_BYTES) + _LENGTH.pack(len(credential)) + credential
        self._sent = hello + answer
        return answer + _prove(self._key, b"coordinator", self._sent)


def derive(key: bytes, purpose: str) -> bytes:
    """Derive another key of 32 bytes, which does not reveal the first."""
    return hmac.digest(key, b"derive\0" + purpose.encode(), "sha256")


def _prove(key: bytes, who: bytes, sent: bytes) -> bytes:
    return hmac.digest(key, who + b"\0" + sent, "sha256")


def _frame_keys(key: bytes, sent: bytes) -> tuple[bytes, bytes]:
    """Of the frames to the coordinator, and of those to the rank."""
    return _prove(key, b"to coordinator", sent), _prove(key, b"to rank", sent)
