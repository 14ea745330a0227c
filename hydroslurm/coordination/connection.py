"""One connection as the hub has it, and who lets it in."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hydroslurm.coordination.frames import Sealer, Unsealer, pack
from hydroslurm.coordination.greeting import HubGreeting
from hydroslurm.slurm.munge import Munge

UNSENT_MOST_BYTES = 256 << 20
"""Of what a rank has not fetched; one that is suspended for days is told little."""
_READ_BYTES = 1 << 18


@dataclass(frozen=True)
class Options:
    """What the hub is told.

    Attributes:
        life, world_size: of the ranks that belong together.
        host, ports: where to listen; the first port that is free.
        parent_pid: of rank 0, which may end before it has joined.
        key: of this attempt, in hexadecimal digits.
        munge_socket: of munged, for ranks that have no key; "" for MUNGE's default, None to refuse
            them.
    """

    life: str
    world_size: int
    host: str
    ports: Sequence[int]
    parent_pid: int
    key: str
    munge_socket: str | None


class Porter:
    """Answers the greetings, in a thread of its own: munged may be slow, and a pause is not to wait
    for it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._munge: Munge | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="porter")
        self._asked: deque[tuple[Line, Future[bytes]]] = deque()
        self.wakes, self._waker = socket.socketpair()
        self.wakes.setblocking(False)
        self._waker.setblocking(False)

    def ask(self, line: Line) -> None:
        """Have the hello of a line answered; see :meth:`done`."""
        answer = self._pool.submit(self._answer, line.greeting)
        self._asked.append((line, answer))
        answer.add_done_callback(self._ring)

    def wake(self) -> None:
        """The descriptor ``wakes`` is ready."""
        with contextlib.suppress(BlockingIOError):
            self.wakes.recv(4096)

    def done(self) -> list[tuple[Line, Future[bytes]]]:
        """What has been answered since."""
        ready = []
        while self._asked and self._asked[0][1].done():  # one thread: in the order of asking
            ready.append(self._asked.popleft())
        return ready

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, greeting: HubGreeting) -> bytes:
        options = self._options
        if self._munge is None and options.munge_socket is not None:
            self._munge = Munge(options.munge_socket or None)
        key = bytes.fromhex(options.key)
        return greeting.answer(key, attempt=options.life, munge=self._munge)

    def _ring(self, _: Future[bytes]) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b".")


class Line:
    """One connection; writing never blocks.

    Attributes:
        has_joined: it has been a rank's.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.greeting = HubGreeting()
        self.since_s = time.monotonic()
        self.frames: Unsealer | None = None
        self.rank: int | None = None
        self.has_joined = False
        self.has_left = False
        self._sealer: Sealer | None = None
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def open_channel(self) -> None:
        """The greeting is over."""
        channel = self.greeting.channel
        assert channel is not None
        self.frames, self._sealer = Unsealer(channel.to_hub), Sealer(channel.to_rank)

    def read(self) -> bytes | None:
        """What has come; b"" at its end, None when nothing has."""
        try:
            return self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return None

    def write(self, message: Any) -> None:
        assert self._sealer is not None
        self.write_bytes(self._sealer.seal(pack(message)))

    def write_bytes(self, data: bytes) -> None:
        self._unsent += data
        self.flush()
        if len(self._unsent) > UNSENT_MOST_BYTES:
            raise OSError(errno.ENOBUFS, "fetches nothing of what it is told")

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self.connection.send(self._unsent)
                del self._unsent[:sent]
