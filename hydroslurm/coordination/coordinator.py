"""The hub: a process of its own beside rank 0, to which every rank holds one connection.

A process, because it has to outlive rank 0: to tell the others that it is gone, and to let a
survivor finish what was begun. Not torch's store: that says nothing when a rank dies, knows no
lives, and a client that was stopped in the middle of a call takes the late answer for that of its
next. It has the standard library only, sleeps until somebody speaks, and ends when all have left.

    python -m hydroslurm.coordination.coordinator

reads its options from its input, for what stands in a command line can be read by everybody: a line
of JSON with the fields of
:class:`hydroslurm.coordination.connection.Options`. It prints one line of JSON, ``{"port": n}`` or
``{"error": words}``, and closes its output.

Anybody on the network can connect. Until a connection has proved that it is a rank of this job step
(see ``greeting``) it costs a descriptor and a few kilobytes, of which there are few, and for a few
seconds; it keeps nobody waiting, and keeps the hub from nothing.
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
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hydroslurm.coordination.connection import Line, Options, Porter
from hydroslurm.coordination.messages import BadMessage, check_from_rank
from hydroslurm.coordination.sockets import listen, make_ready, make_room
from hydroslurm.coordination.state import CoordinatorState, Outbox

LINGER_S = 10.0
"""With nobody connected it waits so long for ranks that are still to come, or to come back."""
GREETING_S = 10.0
"""Within this a connection has proved itself, or is closed."""
GREETING_MOST = 256
"""Connections that have not proved themselves; one more, and the oldest of them is closed. A rank
needs milliseconds, so that whoever fills these places drives out itself."""
ACCEPT_AGAIN_S = 0.5
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SPARE_DESCRIPTORS = 32


class Coordinator:
    """Sockets around a :class:`CoordinatorState`; one thread, and one more for MUNGE."""

    def __init__(self, listener: socket.socket, options: Options) -> None:
        self._options = options
        self._book = CoordinatorState(options.world_size)
        self._porter = Porter(options)
        self._listener = listener
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._porter.wakes, selectors.EVENT_READ, self._porter.wake)
        self._accept_again_s: float | None = None
        self._lines: dict[int, Line] = {}
        self._open: set[Line] = set()
        self._greeting: deque[Line] = deque()
        """Those that have not proved themselves, the oldest first; some may be closed."""
        self._alone_since_s = time.monotonic()

    def run(self) -> None:
        """Serve until all ranks have left, or nobody comes."""
        while not self._is_done():
            for key, _ in self._selector.select(timeout=self._look_again_s()):
                key.data()
            for line, answer in self._porter.done():
                self._attempt(line, lambda line=line, answer=answer: self._answer(line, answer))
            self._look_at_the_clock()
        for line in list(self._open):
            self._drop(line)
        self._porter.close()

    def _is_done(self) -> bool:
        if self._lines:
            self._alone_since_s = time.monotonic()
            return False
        if self._book.is_over:
            return True
        some_left = self._book.died or self._book.left or os.getppid() != self._options.parent_pid
        # as long as rank 0 lives and nobody has come, they may be on their way
        return bool(some_left) and time.monotonic() - self._alone_since_s > LINGER_S

    # --- who comes in
    # --------------------------------------------------------------------------------------------

    def _look_again_s(self) -> float:
        return 1.0 if self._accept_again_s is None else ACCEPT_AGAIN_S

    def _look_at_the_clock(self) -> None:
        now_s = time.monotonic()
        while self._greeting and (
            self._greeting[0].has_joined
            or self._greeting[0] not in self._open
            or now_s - self._greeting[0].since_s > GREETING_S
        ):
            line = self._greeting.popleft()
            if not line.has_joined:
                self._drop(line)
        if self._accept_again_s is not None and now_s >= self._accept_again_s:
            self._accept_again_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in NO_ROOM and not self._drop_oldest():
                # whoever waits stays readable: to look again at once would be a busy loop
                self._selector.unregister(self._listener)
                self._accept_again_s = time.monotonic() + ACCEPT_AGAIN_S
            return
        line = Line(connection)
        self._open.add(line)
        self._greeting.append(line)
        try:
            make_ready(connection)
            connection.setblocking(False)
            self._selector.register(
                connection, selectors.EVENT_READ, lambda: self._attempt(line, self._serve, line)
            )
        except (OSError, ValueError):
            self._drop(line)
        if len(self._open) - len(self._lines) > GREETING_MOST:
            self._drop_oldest()

    def _drop_oldest(self) -> bool:
        """Close the oldest connection that has not proved itself; whether there was one."""
        while self._greeting:
            line = self._greeting.popleft()
            if line in self._open and not line.has_joined:
                self._drop(line)
                return True
        return False

    # --- one connection, whose failures are its own
    # --------------------------------------------------------------------------------------------

    def _attempt(self, line: Line, act: Callable[..., None], *arguments: Any) -> None:
        """Whatever one connection brings about ends that connection, and nothing else."""
        try:
            act(*arguments)
        except Exception:
            self._drop(line)

    def _serve(self, line: Line) -> None:
        """Read, or write what is left, whichever the line is ready for."""
        line.flush()
        data = line.read()
        if data == b"":
            self._drop(line)
            return
        if data:
            self._take(line, data)
        if line in self._open:
            self._watch(line)

    def _take(self, line: Line, data: bytes) -> None:
        if line.frames is None:
            greeting = line.greeting
            asked = greeting.hello is not None
            greeting.feed(data)
            if greeting.hello is not None and not asked:
                self._porter.ask(line)
            if greeting.channel is None:
                return
            line.open_channel()
            data = greeting.channel.rest
        assert line.frames is not None
        for message in line.frames.feed(data):
            self._handle(line, check_from_rank(message))
            if line not in self._open:
                return

    def _answer(self, line: Line, answer: Future[bytes]) -> None:
        if line in self._open:
            line.write_bytes(answer.result())
            self._watch(line)

    def _handle(self, line: Line, message: dict[str, Any]) -> None:
        if line.rank is None:
            self._greet(line, message)
            return
        letters = self._book.handle(line.rank, message)
        if message["do"] == "bye":
            self._lines.pop(line.rank, None)
            line.rank = None
            line.has_left = True
        self._send(letters)

    def _greet(self, line: Line, message: dict[str, Any]) -> None:
        if message["do"] != "join" or line.has_left:
            raise BadMessage("the first word is join")
        rank, ours = message["rank"], message["life"] == self._options.life
        if not ours:
            why: str | None = "another life of the job, or another job"
        elif rank >= self._book.world_size:
            why = f"there is no rank {rank}"
        else:
            why = self._book.why_not(rank, message["world_size"])
        if why is not None:
            line.write({"say": "refused", "why": why, "ours": ours})
            return
        line.rank = rank
        line.has_joined = True
        self._lines[rank] = line
        self._send(self._book.join(rank, message["who"]))

    def _send(self, letters: Outbox) -> None:
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

    def _watch(self, line: Line) -> None:
        key = self._selector.get_key(line.connection)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.has_unsent else 0)
        if key.events != wanted:
            self._selector.modify(line.connection, wanted, key.data)

    def _drop(self, line: Line) -> None:
        if line not in self._open:
            return
        self._open.discard(line)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.connection)
        line.connection.close()
        rank, line.rank = line.rank, None
        if rank is not None and self._lines.get(rank) is line:
            del self._lines[rank]
            self._send(self._book.gone(rank))


def main() -> int:
    # everybody of a job step gets its signals; the hub is to live as long as its ranks do
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    options = Options(**json.loads(sys.stdin.buffer.readline()))
    try:
        make_room(options.world_size + GREETING_MOST + SPARE_DESCRIPTORS)
        listener = listen(options.host, options.ports)
    except OSError as error:
        _say({"error": error.strerror or str(error)})
        return 1
    hub = Coordinator(listener, options)
    _say({"port": listener.getsockname()[1]})
    hub.run()
    return 0


def _say(answer: dict[str, Any]) -> None:
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)


if __name__ == "__main__":
    sys.exit(main())
