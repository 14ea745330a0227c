"""The coordinator: a process beside rank 0, to which every rank holds a connection.

It is a process because it has to outlive rank 0: to tell the others that it is gone, and to let a
survivor finish what was begun. torch's store cannot do this: it does not report a dead rank, does
not tell one start of a job from the next, and a client that was stopped in the middle of a call
takes the late answer for that of its next call. The coordinator uses the standard library only,
sleeps until a message arrives, and ends when all ranks have left.

    python -m hydroslurm.coordination.coordinator

reads its options from stdin, because everybody can read a command line: one line of JSON with the
fields of :class:`CoordinatorOptions`. It prints one line of JSON, ``{"port": n}`` or
``{"error": message}``, and closes its output.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydroslurm.coordination.authentication import unpack
from hydroslurm.coordination.messages import (
    MAX_TEXT,
    BadMessage,
    Message,
    Outbox,
    check_from_rank,
)
from hydroslurm.coordination.network import allow_descriptors, listen
from hydroslurm.coordination.server import (
    MAX_UNAUTHENTICATED,
    SPARE_DESCRIPTORS,
    PeerConnection,
    Server,
)
from hydroslurm.coordination.state import CoordinatorState

ALIKE_BYTES = 512
"""Longest body that is cached: thousands of ranks may send the same."""
LINGER_S = 10.0
"""With no rank connected, how long to wait for ranks that are still to come, or to come back."""
NEWS_S = 0.25
"""Between two announcements of ranks that are gone: many may go one after the other."""


@dataclass(frozen=True)
class CoordinatorOptions:
    """What the coordinator is started with.

    Attributes:
        incarnation_id, world_size: of the ranks that belong together.
        host, ports: where to listen; the first port that is free.
        parent_pid: of rank 0, which may end before it has joined.
        key: of this attempt, in hexadecimal digits.
        credentials: of MUNGE, with the key for ranks that have none; empty to refuse such ranks.
    """

    incarnation_id: str
    world_size: int
    host: str
    ports: Sequence[int]
    parent_pid: int
    key: str
    credentials: Sequence[str]


class Coordinator(Server):
    """A :class:`CoordinatorState` behind sockets."""

    def __init__(self, listener: socket.socket, options: CoordinatorOptions) -> None:
        credentials = [credential.encode() for credential in options.credentials]
        super().__init__(listener, key=bytes.fromhex(options.key), credentials=credentials)
        self._options = options
        self._state = CoordinatorState(options.world_size)
        self._joined: dict[int, PeerConnection] = {}
        self._last_joined_s = self.clock.now_s()
        self._news_due_s = 0.0

    def run(self) -> None:
        """Serve until all ranks have left, or none comes."""
        while not self._is_done():
            self.serve_once()
        self.close()

    def _is_done(self) -> bool:
        if self._joined:
            self._last_joined_s = self.clock.now_s()
            return False
        if self._state.is_over:
            return True
        some_left = self._state.died or self._state.left or os.getppid() != self._options.parent_pid
        # as long as rank 0 lives and no rank has joined, they may be on their way
        return bool(some_left) and self.clock.now_s() - self._last_joined_s > LINGER_S

    def timeout_s(self) -> float:
        if self._state.has_news:
            return max(0.0, self._news_due_s - self.clock.now_s())
        return super().timeout_s()

    def on_round(self) -> None:
        self._announce()

    def on_fault(self, peer: PeerConnection) -> None:
        """Tell another rank: this process has no output."""
        message = {"type": "fault", "message": traceback.format_exc()[-MAX_TEXT:]}
        others = [rank for rank, one in self._joined.items() if one is not peer]
        self._send([(rank, message) for rank in sorted(others)[:1]])

    # --- messages of ranks

    def on_body(self, peer: PeerConnection, body: bytes) -> None:
        message = _read(body)
        if peer.rank is not None:
            self._handle(peer.rank, message)
        else:
            self._join(peer, message)

    def _handle(self, rank: int, message: Message) -> None:
        outbox = self._state.handle(rank, message)
        if message["type"] == "leave":
            self._forget(rank)
        if outbox or self._state.has_news:
            self._announce()
            self._send(outbox)

    def _join(self, peer: PeerConnection, message: Message) -> None:
        if message["type"] != "join" or peer not in self._unjoined:
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
            self.send(refused, [peer])
            return
        peer.rank = rank
        self.admit(peer)
        self._joined[rank] = peer
        self._send(self._state.join(rank, message["cut_off"]))

    def on_drop(self, peer: PeerConnection) -> None:
        if peer.rank is not None:
            rank = peer.rank
            self._forget(rank)
            outbox = self._state.gone(rank)
            self._announce()
            self._send(outbox)

    def _forget(self, rank: int) -> None:
        self._joined.pop(rank).rank = None

    def _announce(self) -> None:
        """Announce the ranks that are gone: at once, unless others went just before."""
        if self._state.has_news and (now_s := self.clock.now_s()) >= self._news_due_s:
            self._news_due_s = now_s + NEWS_S
            self._send(self._state.announce())

    def _send(self, outbox: Outbox) -> None:
        """Each message is packed once, for all its ranks: those that follow each other."""
        for _, run in itertools.groupby(outbox, key=lambda item: id(item[1])):
            items = list(run)
            peers = [self._joined[rank] for rank, _ in items if rank in self._joined]
            self.send(items[0][1], peers)


def _read(body: bytes) -> Message:
    """One message of a rank, for reading only: ranks that send the same bytes share it."""
    return _read_alike(body) if len(body) <= ALIKE_BYTES else check_from_rank(unpack(body))


@functools.lru_cache(16)
def _read_alike(body: bytes) -> Message:
    return check_from_rank(unpack(body))


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
