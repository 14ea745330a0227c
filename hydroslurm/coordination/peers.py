"""The coordinator's connections: what is unread and unsent, and who is at the other end."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from hydroslurm.coordination.authentication import CoordinatorGreeting
from hydroslurm.coordination.frames import Sealer, Unsealer, digest
from hydroslurm.slurm.munge import Munge

MAX_UNSENT_BYTES = 256 << 20
"""Of messages that a rank has not read; a rank that is suspended for days is sent few."""
_READ_BYTES = 1 << 18
_COPIED_BYTES = 1 << 14
"""Shorter bodies are copied behind their heads; longer ones are shared by all who are sent them."""
_AT_ONCE = 64
"""Buffers of one write."""

_read_buffer = memoryview(bytearray(_READ_BYTES))
"""One for all: recv() would map and unmap a quarter of a megabyte for each message."""


class Packed:
    """A body that is hashed once, for as many connections as it is sent on."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.digest = digest(body)


class PeerConnection:
    """One connection as the coordinator has it; writing never blocks.

    Attributes:
        rank: that has joined on it, and is present.
        has_joined: a rank has joined on it.
        events: what the selector watches for.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.greeting = CoordinatorGreeting()
        self.since_s = time.monotonic()
        self.unsealer: Unsealer | None = None
        self.rank: int | None = None
        self.has_joined = False
        self.events = 0
        self._sealer: Sealer | None = None
        self._unsent: deque[bytes | memoryview] = deque()
        self._unsent_bytes = 0

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def open_session(self) -> None:
        """The peer has authenticated: take the keys of the session."""
        session = self.greeting.session
        assert session is not None
        self.unsealer, self._sealer = Unsealer(session.to_coordinator), Sealer(session.to_rank)

    def read(self) -> bytes | None:
        """What has arrived; b"" at its end, None when nothing has."""
        try:
            count = self.connection.recv_into(_read_buffer)
        except BlockingIOError:
            return None
        return bytes(_read_buffer[:count])

    def put(self, packed: Packed) -> None:
        """Seal a body, to be sent by :meth:`flush`. Frames are counted, so it has to be sent."""
        assert self._sealer is not None
        head = self._sealer.head(len(packed.body), packed.digest)
        if len(packed.body) <= _COPIED_BYTES:
            self.put_bytes(head + packed.body)
        else:
            self.put_bytes(head)
            self.put_bytes(packed.body)

    def put_bytes(self, data: bytes) -> None:
        """To be sent by :meth:`flush`."""
        self._unsent.append(data)
        self._unsent_bytes += len(data)

    def flush(self) -> None:
        """Send what can be sent; raises OSError for a peer that does not read, or is gone."""
        while self._unsent:
            try:
                if len(self._unsent) == 1:
                    sent = self.connection.send(self._unsent[0])
                else:
                    sent = self.connection.sendmsg(itertools.islice(self._unsent, _AT_ONCE))
            except BlockingIOError:
                break
            self._sent(sent)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            raise OSError(errno.ENOBUFS, "reads nothing of what it is sent")

    def _sent(self, count: int) -> None:
        self._unsent_bytes -= count
        if not self._unsent_bytes:
            self._unsent.clear()
            return
        while count:
            first = self._unsent.popleft()
            if count < len(first):
                self._unsent.appendleft(memoryview(first)[count:])
                return
            count -= len(first)


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

    def answer_at_once(self, greeting: CoordinatorGreeting) -> bytes:
        """The answer to a rank that has the key, for which nobody has to be asked."""
        return greeting.answer(self._key, attempt=self._attempt, munge=None)

    def ask(self, peer: PeerConnection) -> None:
        """Have the hello of a peer without the key answered; see :meth:`answered`."""
        answer = self._pool.submit(self._answer, peer.greeting)
        self._asked.append((peer, answer))
        answer.add_done_callback(self._wake)

    def _wake(self, _answer: Future[bytes]) -> None:
        """Make the descriptor ``wakeup`` ready, in the thread that answers."""
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
