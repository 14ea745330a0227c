"""The coordinator's connections: what is unread and unsent, and who is at the other end."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hydroslurm.coordination.authentication import CoordinatorGreeting
from hydroslurm.coordination.messages import Sealer, Unsealer, pack
from hydroslurm.slurm.munge import Munge

MAX_UNSENT_BYTES = 256 << 20
"""Of messages that a rank has not read; a rank that is suspended for days is sent few."""
_READ_BYTES = 1 << 18


class PeerConnection:
    """One connection as the coordinator has it; writing never blocks.

    Attributes:
        rank: that has joined on it, and is present.
        relayed: of a relay's connection: the ranks that have joined through it; None for a rank's.
        has_joined: a rank or a relay has joined on it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.greeting = CoordinatorGreeting()
        self.since_s = time.monotonic()
        self.unsealer: Unsealer | None = None
        self.rank: int | None = None
        self.relayed: set[int] | None = None
        self.has_joined = False
        self._sealer: Sealer | None = None
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def open_session(self) -> None:
        """The peer has authenticated: take the keys of the session."""
        session = self.greeting.session
        assert session is not None
        self.unsealer, self._sealer = Unsealer(session.to_coordinator), Sealer(session.to_rank)

    def use(self, *, sealer: Sealer, unsealer: Unsealer) -> None:
        """Take the keys of a session that was opened elsewhere."""
        self.unsealer, self._sealer = unsealer, sealer

    def read(self) -> bytes | None:
        """What has arrived; b"" at its end, None when nothing has."""
        try:
            return self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return None

    def write(self, message: Any) -> None:
        self.write_body(pack(message))

    def write_body(self, body: bytes) -> None:
        assert self._sealer is not None
        self.write_bytes(self._sealer.seal(body))

    def write_bytes(self, data: bytes) -> None:
        self._unsent += data
        self.flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise OSError(errno.ENOBUFS, "reads nothing of what it is sent")

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self.connection.send(self._unsent)
                del self._unsent[:sent]


class Authenticator:
    """Answers greetings in a thread of its own: munged may be slow, and must not delay a pause."""

    def __init__(self, *, key: str, attempt: str, munge_socket: str | None) -> None:
        """As in ``CoordinatorOptions``; ``attempt`` is the incarnation."""
        self._key = bytes.fromhex(key)
        self._attempt = attempt
        self._munge_socket = munge_socket
        self._munge: Munge | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="authenticator")
        self._asked: deque[tuple[PeerConnection, Future[bytes]]] = deque()
        self.wakeup, self._waker = socket.socketpair()
        self.wakeup.setblocking(False)
        self._waker.setblocking(False)

    def ask(self, peer: PeerConnection) -> None:
        """Have the hello of a peer answered; see :meth:`answered`."""
        answer = self._pool.submit(self._answer, peer.greeting)
        self._asked.append((peer, answer))
        answer.add_done_callback(lambda _: self.wake())

    def wake(self) -> None:
        """Make the descriptor ``wakeup`` ready; from any thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    def on_wakeup(self) -> None:
        """The descriptor ``wakeup`` is ready."""
        with contextlib.suppress(BlockingIOError):
            self.wakeup.recv(4096)

    def answered(self) -> list[tuple[PeerConnection, Future[bytes]]]:
        """What has been answered since the last call."""
        ready = []
        while self._asked and self._asked[0][1].done():  # one thread: in the order of asking
            ready.append(self._asked.popleft())
        return ready

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.wakeup.close()
        self._waker.close()

    def _answer(self, greeting: CoordinatorGreeting) -> bytes:
        if self._munge is None and self._munge_socket is not None:
            self._munge = Munge(self._munge_socket or None)
        return greeting.answer(self._key, attempt=self._attempt, munge=self._munge)
