"""The coordinator: a process of its own beside rank 0, to which every rank holds one connection.

It is a process because it has to outlive rank 0: to tell the others that it is gone, and to let a
survivor finish what was begun. torch's store cannot do this: it does not report a dead rank, does
not tell one start of a job from the next, and a client that was stopped in the middle of a call
takes the late answer for that of its next call. The coordinator uses the standard library only,
sleeps until a message arrives, and ends when all ranks have left.

    python -m hydroslurm.coordination.coordinator

reads its options from stdin, because everybody can read a command line: one line of JSON with the
fields of :class:`CoordinatorOptions`. It prints one line of JSON, ``{"port": n}`` or
``{"error": message}``, and closes its output.

Anybody on the network can connect. Until a connection has proved that it is a rank of this job step
(:mod:`hydroslurm.coordination.authentication`) it costs a descriptor and a few kilobytes, for a few
seconds, and the number of such connections is bounded. It cannot delay a rank.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hydroslurm.coordination.messages import (
    BadMessage,
    Message,
    Outbox,
    check_from_rank,
)
from hydroslurm.coordination.network import allow_descriptors, configure_socket, listen
from hydroslurm.coordination.peers import Authenticator, Packed, PeerConnection
from hydroslurm.coordination.state import CoordinatorState

LINGER_S = 10.0
"""With no rank connected, how long to wait for ranks that are still to come, or to come back."""
GREETING_S = 10.0
"""A connection that has not authenticated by then is closed."""
MAX_UNAUTHENTICATED = 256
"""Connections that have not authenticated; one more, and the oldest is closed. A rank needs only
milliseconds, so whoever floods the coordinator drives out its own connections."""
ACCEPT_AGAIN_S = 0.5
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SPARE_DESCRIPTORS = 32
ACCEPTS = 64
"""Connections taken between two looks at those that exist: these must not wait for a flood."""
NEWS_S = 0.25
"""Between two announcements of ranks that are gone: so many may go one after the other."""


@dataclass(frozen=True)
class CoordinatorOptions:
    """What the coordinator is started with.

    Attributes:
        incarnation_id, world_size: of the ranks that belong together.
        host, ports: where to listen; the first port that is free.
        parent_pid: of rank 0, which may end before it has joined.
        key: of this attempt, in hexadecimal digits.
        munge_socket: of munged, for ranks that have no key; "" for MUNGE's default, None to refuse
            such ranks.
    """

    incarnation_id: str
    world_size: int
    host: str
    ports: Sequence[int]
    parent_pid: int
    key: str
    munge_socket: str | None


class Coordinator:
    """Sockets around a :class:`CoordinatorState`; one thread, and one more for MUNGE."""

    def __init__(self, listener: socket.socket, options: CoordinatorOptions) -> None:
        self._options = options
        self._state = CoordinatorState(options.world_size)
        self._authenticator = Authenticator(
            key=options.key, attempt=options.incarnation_id, munge_socket=options.munge_socket
        )
        self._listener = listener
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(
            self._authenticator.wakeup, selectors.EVENT_READ, self._authenticator.on_wakeup
        )
        self._accept_again_s: float | None = None
        self._joined: dict[int, PeerConnection] = {}
        self._open: set[PeerConnection] = set()
        self._unauthenticated: deque[PeerConnection] = deque()
        """The oldest first; some may be closed."""
        self._last_joined_s = time.monotonic()
        self._unflushed: dict[PeerConnection, None] = {}
        self._news_due_s = 0.0

    def run(self) -> None:
        """Serve until all ranks have left, or none comes."""
        while not self._is_done():
            for key, _ in self._selector.select(timeout=self._select_timeout_s()):
                if isinstance(key.data, PeerConnection):
                    self._guarded(key.data, self._serve, key.data)
                else:
                    key.data()
            for peer, answer in self._authenticator.answered():
                self._guarded(peer, self._answer, peer, answer)
            self._announce()
            self._flush()
            self._expire()
        for peer in list(self._open):
            self._drop(peer)
        self._authenticator.close()

    def _is_done(self) -> bool:
        if self._joined:
            self._last_joined_s = time.monotonic()
            return False
        if self._state.is_over:
            return True
        some_left = self._state.died or self._state.left or os.getppid() != self._options.parent_pid
        # as long as rank 0 lives and no rank has joined, they may be on their way
        return bool(some_left) and time.monotonic() - self._last_joined_s > LINGER_S

    # --- accepting connections

    def _select_timeout_s(self) -> float:
        if self._state.has_news:
            return max(0.0, self._news_due_s - time.monotonic())
        return 1.0 if self._accept_again_s is None else ACCEPT_AGAIN_S

    def _expire(self) -> None:
        """Drop connections that have not authenticated in time; accept again after a pause."""
        now_s = time.monotonic()
        while self._unauthenticated and (
            self._unauthenticated[0].has_joined
            or self._unauthenticated[0] not in self._open
            or now_s - self._unauthenticated[0].since_s > GREETING_S
        ):
            peer = self._unauthenticated.popleft()
            if not peer.has_joined:
                self._drop(peer)
        if self._accept_again_s is not None and now_s >= self._accept_again_s:
            self._accept_again_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES and not self._drop_oldest():
                    # the waiting connection stays readable: trying again at once would be a busy
                    # loop
                    self._selector.unregister(self._listener)
                    self._accept_again_s = time.monotonic() + ACCEPT_AGAIN_S
                return
            self._open_peer(PeerConnection(connection))

    def _open_peer(self, peer: PeerConnection) -> None:
        self._open.add(peer)
        self._unauthenticated.append(peer)
        try:
            configure_socket(peer.connection)
            peer.connection.setblocking(False)
            peer.events = selectors.EVENT_READ
            self._selector.register(peer.connection, peer.events, peer)
        except (OSError, ValueError):
            self._drop(peer)
        if len(self._open) - len(self._joined) > MAX_UNAUTHENTICATED:
            self._drop_oldest()

    def _drop_oldest(self) -> bool:
        """Close the oldest connection that has not authenticated; return whether there was one."""
        while self._unauthenticated:
            peer = self._unauthenticated.popleft()
            if peer in self._open and not peer.has_joined:
                self._drop(peer)
                return True
        return False

    # --- one connection, whose failures are its own

    def _guarded(self, peer: PeerConnection, act: Callable[..., None], *arguments: Any) -> None:
        """Whatever goes wrong on one connection ends that connection and nothing else."""
        try:
            act(*arguments)
        except Exception:
            self._drop(peer)

    def _serve(self, peer: PeerConnection) -> None:
        """Read what has arrived; what is left to write is written at the end of the round."""
        if peer.has_unsent:
            self._unflushed[peer] = None
        data = peer.read()
        if data == b"":
            self._drop(peer)
        elif data:
            self._receive(peer, data)

    def _receive(self, peer: PeerConnection, data: bytes) -> None:
        if peer.unsealer is None:
            greeting = peer.greeting
            had_hello = greeting.hello is not None
            greeting.feed(data)
            if greeting.hello is not None and not had_hello:
                self._answer_hello(peer)
            if greeting.session is None:
                return
            peer.open_session()
            data = greeting.session.rest
        assert peer.unsealer is not None
        for message in peer.unsealer.feed(data):
            self._handle(peer, check_from_rank(message))
            if peer not in self._open:
                return

    def _answer_hello(self, peer: PeerConnection) -> None:
        if peer.greeting.asks_munge:
            self._authenticator.ask(peer)
        else:
            peer.put_bytes(self._authenticator.answer_at_once(peer.greeting))
            self._unflushed[peer] = None

    def _answer(self, peer: PeerConnection, answer: Future[bytes]) -> None:
        if peer in self._open:
            peer.put_bytes(answer.result())
            self._unflushed[peer] = None

    def _handle(self, peer: PeerConnection, message: Message) -> None:
        if peer.rank is None:
            self._join(peer, message)
            return
        outbox = self._state.handle(peer.rank, message)
        if message["type"] == "leave":
            self._joined.pop(peer.rank, None)
            peer.rank = None
            peer.has_left = True
        self._announce()
        self._send(outbox)

    def _join(self, peer: PeerConnection, message: Message) -> None:
        if message["type"] != "join" or peer.has_left:
            raise BadMessage("the first message is join")
        rank = message["rank"]
        same_incarnation = message["incarnation_id"] == self._options.incarnation_id
        if not same_incarnation:
            reason: str | None = "another incarnation of the job, or another job"
        elif rank >= self._state.world_size:
            reason = f"there is no rank {rank}"
        else:
            reason = self._state.why_not(rank, message["world_size"])
        if reason is not None:
            refused = {"type": "refused", "reason": reason, "same_incarnation": same_incarnation}
            peer.put(Packed(refused))
            self._unflushed[peer] = None
            return
        peer.rank = rank
        peer.has_joined = True
        self._joined[rank] = peer
        self._send(self._state.join(rank, message["cut_off"]))

    def _send(self, outbox: Outbox) -> None:
        """Put messages on their way; :meth:`_flush` has all of one round sent at once."""
        packed: Packed | None = None
        for rank, message in outbox:
            peer = self._joined.get(rank)
            if peer is None:
                continue
            if packed is None or packed.message is not message:
                packed = Packed(message)
            peer.put(packed)
            self._unflushed[peer] = None

    def _announce(self) -> None:
        """Say who is gone, at once if nobody has gone lately."""
        if self._state.has_news and (now_s := time.monotonic()) >= self._news_due_s:
            self._news_due_s = now_s + NEWS_S
            self._send(self._state.announce())

    def _flush(self) -> None:
        """Write what can be written; a peer that is lost over it may be news for others."""
        while self._unflushed:
            peers, self._unflushed = self._unflushed, {}
            for peer in peers:
                if peer in self._open:
                    self._guarded(peer, self._flush_peer, peer)

    def _flush_peer(self, peer: PeerConnection) -> None:
        peer.flush()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.has_unsent else 0)
        if peer.events != wanted:
            peer.events = wanted
            self._selector.modify(peer.connection, wanted, peer)

    def _drop(self, peer: PeerConnection) -> None:
        if peer not in self._open:
            return
        self._open.discard(peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()
        rank, peer.rank = peer.rank, None
        if rank is not None and self._joined.get(rank) is peer:
            del self._joined[rank]
            outbox = self._state.gone(rank)
            self._announce()
            self._send(outbox)


def main() -> int:
    # all processes of a job step get its signals; the coordinator has to outlive its ranks
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    options = CoordinatorOptions(**json.loads(sys.stdin.buffer.readline()))
    try:
        allow_descriptors(options.world_size + MAX_UNAUTHENTICATED + SPARE_DESCRIPTORS)
        listener = listen(options.host, options.ports)
    except OSError as error:
        _report({"error": error.strerror or str(error)})
        return 1
    coordinator = Coordinator(listener, options)
    _report({"port": listener.getsockname()[1]})
    coordinator.run()
    return 0


def _report(answer: dict[str, Any]) -> None:
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)


if __name__ == "__main__":
    sys.exit(main())
