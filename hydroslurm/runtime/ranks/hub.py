"""The hub: a process of its own beside rank 0, to which every rank holds one connection.

A process, because it has to outlive rank 0: to tell the others that it is gone, and to let a
survivor finish what was begun. Not torch's store: that says nothing when a rank dies, knows no
lives, and a client that was stopped in the middle of a call takes the late answer for that of its
next. It has the standard library only, sleeps until somebody speaks, and ends when all have left.

    python -m hydroslurm.runtime.ranks.hub '{"life": ..., "world_size": ..., "host": ...}'

prints one line of JSON, ``{"port": n}`` or ``{"error": words}``, and closes its output.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from hydroslurm.runtime.ranks.book import Book, Letters
from hydroslurm.runtime.ranks.frames import BadFrame, Unpacker, pack

JOIN_S = 900.0
"""The hub of a job whose ranks never come ends after so long."""
LINGER_S = 10.0
"""With nobody connected it waits so long for ranks that are still to come, or to come back."""
HELLO_LIMIT_BYTES = 1 << 16
"""Of what a stranger may send before it has said who it is."""
_READ_BYTES = 1 << 18


class Hub:
    """Sockets around a :class:`Book`; one thread."""

    def __init__(
        self, listener: socket.socket, *, life: str, world_size: int, parent_pid: int
    ) -> None:
        """``parent_pid``: of rank 0, which may end before it has joined."""
        self._life = life
        self._book = Book(world_size)
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._lines: dict[int, _Line] = {}
        self._open: set[_Line] = set()
        self._alone_since_s = time.monotonic()
        self._parent_pid = parent_pid

    def run(self) -> None:
        """Serve until all ranks have left, or nobody comes."""
        while not self._is_done():
            for key, _ in self._selector.select(timeout=1.0):
                if key.data is None:
                    self._accept()
                else:
                    self._serve(key.data)
        for line in list(self._open):
            self._drop(line)

    def _is_done(self) -> bool:
        if self._open:
            self._alone_since_s = time.monotonic()
            return False
        if self._book.is_over:
            return True
        some_left = self._book.died or self._book.left or os.getppid() != self._parent_pid
        patience_s = LINGER_S if some_left else JOIN_S
        return time.monotonic() - self._alone_since_s > patience_s

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            make_ready(connection)
            connection.setblocking(False)
            line = _Line(connection)
            self._open.add(line)
            self._selector.register(connection, selectors.EVENT_READ, line)

    def _serve(self, line: _Line) -> None:
        """Read, or write what is left, whichever the line is ready for."""
        try:
            line.flush()
            data = line.read()
            messages = line.unpacker.feed(data) if data else []
        except (OSError, BadFrame):
            self._drop(line)
            return
        for message in messages:
            try:
                self._handle(line, message)
            except (KeyError, TypeError, ValueError, AttributeError):
                self._drop(line)  # no rank of ours
                return
        if data == b"":
            self._drop(line)
        elif line in self._open:
            self._watch(line)

    def _handle(self, line: _Line, message: Any) -> None:
        if line.rank is None:
            self._greet(line, message)
            return
        letters = self._book.handle(line.rank, message)
        if message["do"] == "bye":
            self._lines.pop(line.rank, None)
            line.rank = None
            line.has_left = True
        self._send(letters)

    def _greet(self, line: _Line, message: Any) -> None:
        if message["do"] != "join" or line.has_left:
            raise ValueError("the first word is join")
        rank = int(message["rank"])
        why = None
        if message["life"] != self._life:
            why = "another life of the job, or another job"
        elif not 0 <= rank < self._book.world_size:
            why = f"there is no rank {rank}"
        else:
            why = self._book.why_not(rank, int(message["world_size"]))
        if why is not None:
            ours = message["life"] == self._life
            line.write({"say": "refused", "why": why, "ours": ours})
            self._watch(line)
            return
        line.rank = rank
        line.unpacker = Unpacker()
        self._lines[rank] = line
        self._send(self._book.join(rank, message.get("who")))

    def _send(self, letters: Letters) -> None:
        broken = []
        for rank, message in letters:
            line = self._lines.get(rank)
            if line is None:
                continue
            try:
                line.write(message)
                self._watch(line)
            except OSError:
                broken.append(line)
        for line in broken:
            self._drop(line)

    def _watch(self, line: _Line) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.has_unsent else 0)
        self._selector.modify(line.connection, wanted, line)

    def _drop(self, line: _Line) -> None:
        if line not in self._open:
            return
        self._open.discard(line)
        self._selector.unregister(line.connection)
        line.connection.close()
        rank, line.rank = line.rank, None
        if rank is not None and self._lines.get(rank) is line:
            del self._lines[rank]
            self._send(self._book.gone(rank))


class _Line:
    """One connection; writing never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unpacker = Unpacker(limit_bytes=HELLO_LIMIT_BYTES)
        self.rank: int | None = None
        self.has_left = False
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def read(self) -> bytes | None:
        """What has come; b"" at its end, None when nothing has."""
        try:
            return self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return None

    def write(self, message: Any) -> None:
        self._unsent += pack(message)
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self.connection.send(self._unsent)
                del self._unsent[:sent]


def make_ready(connection: socket.socket) -> None:
    """Send small messages at once, and notice a peer whose node has vanished. A process that is
    only stopped keeps its connection, for its kernel answers."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(host: str, ports: Sequence[int]) -> socket.socket:
    """A listening socket at the first port that is free, reachable as ``host``.

    Raises:
        OSError: none is free.
    """
    failure: OSError | None = None
    for port in ports:
        for address in dict.fromkeys((_address(host), "0.0.0.0")):
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((address, port))
                listener.listen(1024)
            except OSError as error:
                listener.close()
                failure = error
                continue
            return listener
    raise failure or OSError("no port to listen at")


def _address(host: str) -> str:
    """Loopback stays loopback; a name that does not resolve here may do so elsewhere."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "0.0.0.0"


def main(arguments: Sequence[str]) -> int:
    # everybody of a job step gets its signals; the hub is to live as long as its ranks do
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    options = json.loads(arguments[0])
    try:
        listener = listen(options["host"], options["ports"])
    except OSError as error:
        _say({"error": str(error)})
        return 1
    hub = Hub(
        listener,
        life=options["life"],
        world_size=options["world_size"],
        parent_pid=options["parent_pid"],
    )
    _say({"port": listener.getsockname()[1]})
    hub.run()
    return 0


def _say(answer: dict[str, Any]) -> None:
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
