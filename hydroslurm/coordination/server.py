"""A listener open to everybody that serves only peers that authenticate.

Until a connection has proved that it belongs to this job step
(:mod:`hydroslurm.coordination.authentication`) it costs a descriptor and a few kilobytes, for a few
seconds, and the number of such connections is bounded. It cannot delay a rank. The coordinator of a
job step and that of an elastic run are built on this.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hydroslurm.coordination.authentication import BadFrame, Greeting, GreetingFailed, digest, pack
from hydroslurm.coordination.messages import BadMessage, Message
from hydroslurm.coordination.network import configure_socket
from hydroslurm.core.awake_clock import AwakeClock

GREETING_S = 10.0
"""A connection that has not authenticated and joined by then is closed."""
MAX_UNAUTHENTICATED = 256
"""Connections that have not joined; one more, and the oldest of the address that has the most is
closed. So a flood drives out its own connections; ranks on the flooding node need milliseconds."""
ACCEPT_AGAIN_S = 0.5
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SPARE_DESCRIPTORS = 32
OF_A_PEER = (OSError, BadMessage, BadFrame, GreetingFailed)
"""Errors that a peer can cause; any other is a fault of ours."""
ACCEPTS = 64
"""Connections accepted before the existing ones are served: a flood must not delay them."""
MAX_UNSENT_BYTES = 256 << 20
"""Most unread messages of a rank; one that is suspended for days is sent few."""
_READ_BYTES = 1 << 18
_LONG_BYTES = 1 << 14
"""Longer bodies are sent at once: thousands of peers must not have a copy of each."""

_read_buffer = memoryview(bytearray(_READ_BYTES))
"""Shared: recv() would map and unmap a quarter of a megabyte per message."""


class PeerConnection:
    """One connection as the coordinator has it; writing never blocks.

    Attributes:
        address: of the peer's node.
        rank: that has joined on it, and is present.
        events: what the selector watches for, which each flush asks.
        unsent: what it has not taken yet of what it was sent.
    """

    def __init__(
        self,
        connection: socket.socket,
        address: str,
        greeting: Greeting,
        *,
        since_s: float,
    ) -> None:
        self.connection = connection
        self.address = address
        self.greeting = greeting
        self.since_s = since_s
        self.rank: int | None = None
        self.events = selectors.EVENT_READ
        self.unsent = bytearray()

    def read(self) -> bytes | None:
        """What has arrived; b"" at its end, None when nothing has."""
        try:
            count = self.connection.recv_into(_read_buffer)
        except BlockingIOError:
            return None
        return bytes(_read_buffer[:count])

    def put(self, body: bytes, body_digest: bytes) -> None:
        """Seal a body, to be sent by :meth:`flush`. Frames are counted, so it has to be sent."""
        assert self.greeting.session is not None
        self.unsent += self.greeting.session.sealer.head(len(body), body_digest)
        self.unsent += body
        if len(body) > _LONG_BYTES:
            with contextlib.suppress(OSError):  # which comes again
                self.flush()

    def flush(self) -> None:
        """Send what can be sent; raises OSError for a peer that does not read, or is gone."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]
        if len(self.unsent) > MAX_UNSENT_BYTES:
            raise OSError(errno.ENOBUFS, "reads nothing of what it is sent")


class Server:
    """Accepts, authenticates, reads and writes, in one thread; a subclass says what a message means
    (:meth:`on_body`) and what the end of a connection means (:meth:`on_drop`).

    Attributes:
        clock: times everything here, and is read in each round: a server that was stopped itself
            takes no peer for late or silent.
    """

    def __init__(
        self, listener: socket.socket, *, key: bytes, credentials: Sequence[bytes] = ()
    ) -> None:
        """The other arguments are those of :meth:`Greeting.of_coordinator`."""
        self.clock = AwakeClock()
        self._key = key
        self._credentials = credentials
        self._listener = listener
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._accept_again_s: float | None = None
        self._open: set[PeerConnection] = set()
        self._unjoined: dict[PeerConnection, None] = {}
        """Connections on which no rank has joined, oldest first."""
        self._unflushed: dict[PeerConnection, None] = {}

    def on_body(self, peer: PeerConnection, body: bytes) -> None:
        """Handle one frame of an authenticated peer; an exception ends the connection."""
        raise NotImplementedError

    def on_drop(self, peer: PeerConnection) -> None:
        """The connection has ended."""
        raise NotImplementedError

    def on_fault(self, peer: PeerConnection) -> None:
        """A fault of our own is about to end a connection; the exception is being handled."""
        raise NotImplementedError

    def on_round(self) -> None:
        """All that has arrived has been served; what is sent now goes out with its answers."""

    def timeout_s(self) -> float:
        """The longest to wait for what comes next."""
        return 1.0 if self._accept_again_s is None else ACCEPT_AGAIN_S

    def serve_once(self) -> None:
        """Wait for what comes next and serve it; then write, once per connection."""
        for key, _ in self._selector.select(timeout=self.timeout_s()):
            if isinstance(key.data, PeerConnection):
                self._guarded(key.data, self._serve, key.data)
            else:
                key.data()
        self.on_round()
        while self._unflushed:  # one that is lost over it may be news for others
            peers, self._unflushed = self._unflushed, {}
            for peer in peers:
                self.flush(peer)
        self._expire()

    def close(self) -> None:
        """End all connections."""
        for peer in list(self._open):
            self.drop(peer)
        self._selector.close()
        self._listener.close()

    def send(self, message: Message, peers: Iterable[PeerConnection]) -> None:
        """Put a message on its way, packed and hashed once for all who get it; raises ValueError
        for one that is too long."""
        body = pack(message)
        body_digest = digest(body)
        for peer in peers:
            peer.put(body, body_digest)
            self._unflushed[peer] = None

    def flush(self, peer: PeerConnection) -> None:
        """Write what the peer takes now, and wait for it to take the rest."""
        if peer in self._open:
            self._guarded(peer, self._flush, peer)

    def admit(self, peer: PeerConnection) -> None:
        """A rank has joined on it: it is never dropped in favour of others."""
        self._unjoined.pop(peer, None)

    def drop(self, peer: PeerConnection) -> None:
        """End a connection."""
        if peer not in self._open:
            return
        self._open.discard(peer)
        self._unjoined.pop(peer, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()
        self.on_drop(peer)

    # --- accepting connections

    def _expire(self) -> None:
        """Drop connections that have not joined in time; accept again after a pause."""
        now_s = self.clock.now_s()
        while (oldest := next(iter(self._unjoined), None)) is not None:
            if now_s - oldest.since_s <= GREETING_S:
                break
            self.drop(oldest)
        if self._accept_again_s is not None and now_s >= self._accept_again_s:
            self._accept_again_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, (address, _) = self._listener.accept()
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES and not self._drop_oldest():
                    # the waiting connection stays readable: trying again at once would be a busy
                    # loop
                    self._selector.unregister(self._listener)
                    self._accept_again_s = self.clock.now_s() + ACCEPT_AGAIN_S
                return
            greeting = Greeting.of_coordinator(self._key, self._credentials)
            peer = PeerConnection(connection, address, greeting, since_s=self.clock.now_s())
            self._take(peer)

    def _take(self, peer: PeerConnection) -> None:
        self._open.add(peer)
        self._unjoined[peer] = None
        try:
            configure_socket(peer.connection)
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, peer.events, peer)
        except (OSError, ValueError):
            self.drop(peer)
        if len(self._unjoined) > MAX_UNAUTHENTICATED:
            self._drop_oldest(most=MAX_UNAUTHENTICATED)

    def _drop_oldest(self, *, most: int = 0) -> bool:
        """If more than ``most`` connections have not joined, close the oldest of the address that
        has most of them; return whether one was closed."""
        if len(self._unjoined) <= most:
            return False
        addresses = Counter(one.address for one in self._unjoined)
        # most_common() imports a module, for which there may be no descriptor
        crowded = max(addresses, key=addresses.__getitem__)
        self.drop(next(one for one in self._unjoined if one.address == crowded))
        return True

    # --- one connection, whose failures are its own

    def _guarded(self, peer: PeerConnection, act: Callable[..., None], *arguments: Any) -> None:
        """An error on one connection ends that connection and nothing else."""
        try:
            act(*arguments)
        except OF_A_PEER:
            self.drop(peer)
        except Exception:
            self.on_fault(peer)
            self.drop(peer)

    def _serve(self, peer: PeerConnection) -> None:
        """Read what has arrived; what is left to write is written at the end of the round."""
        if peer.unsent:
            self._unflushed[peer] = None
        data = peer.read()
        if data == b"":
            self.drop(peer)
        elif data:
            self._receive(peer, data)

    def _flush(self, peer: PeerConnection) -> None:
        peer.flush()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if peer.events != wanted:
            peer.events = wanted
            self._selector.modify(peer.connection, wanted, peer)

    def _receive(self, peer: PeerConnection, data: bytes) -> None:
        session = peer.greeting.session
        if session is None:
            if answer := peer.greeting.feed(data):
                peer.unsent += answer
                self._unflushed[peer] = None
            session = peer.greeting.session
            if session is None:
                return
            data = peer.greeting.rest
        for body in session.unsealer.bodies(data):
            self.on_body(peer, body)
            if peer not in self._open:
                return
