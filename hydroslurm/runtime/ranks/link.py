"""A rank's connection to the hub: one thread that sleeps in ``select``, and senders from any."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from hydroslurm.errors import HubLost
from hydroslurm.runtime.ranks.frames import BadFrame, Unpacker, pack

_READ_BYTES = 1 << 18


class Link:
    """Sends at once, and hands what comes to one function, in a thread of its own.

    Nothing is imported and no lock of a training thread is taken here: it has to go on while that
    is parked.
    """

    def __init__(
        self,
        connection: socket.socket,
        unpacker: Unpacker,
        *,
        hear: Callable[[Any], None],
        due_s: Callable[[], float | None],
        tick: Callable[[], None],
    ) -> None:
        """
        Args:
            hear: gets each message.
            due_s: when ``tick`` is wanted (``time.monotonic()``), None for not at all.
            tick: called then.
        """
        self._connection = connection
        self._unpacker = unpacker
        self._hear = hear
        self._due_s = due_s
        self._tick = tick
        self._sending = threading.Lock()
        self._closed = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)

    def send(self, message: Any) -> None:
        """Send one message; from any thread.

        Raises:
            HubLost: the hub is gone.
        """
        data = pack(message)
        try:
            with self._sending:
                self._connection.sendall(data)
        except OSError as error:
            raise HubLost(f"what connects the ranks of this job is gone ({error})") from error

    def wake(self) -> None:
        """Have ``due_s`` asked again."""
        with contextlib.suppress(OSError):
            self._wake_write.send(b".")

    def close(self) -> None:
        """End the thread at its next look."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self.wake()

    def run(self, first: list[Any]) -> None:
        """The thread; until :meth:`close`. ``first``: what came with the welcome.

        Raises:
            HubLost: the hub is gone.
        """
        try:
            for message in first:
                self._hear(message)
            while not self._closed:
                self._wait()
        except (OSError, BadFrame, HubLost) as error:
            if not self._closed:
                raise HubLost(f"what connects the ranks of this job is gone ({error})") from error
        finally:
            for end in (self._connection, self._wake_read, self._wake_write):
                end.close()

    def _wait(self) -> None:
        due_s = self._due_s()
        left_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        ready = select.select([self._connection, self._wake_read], [], [], left_s)[0]
        if self._wake_read in ready:
            self._wake_read.recv(4096)
        if self._connection in ready:
            data = self._connection.recv(_READ_BYTES)
            if not data:
                raise OSError("closed by the hub")
            for message in self._unpacker.feed(data):
                self._hear(message)
        due_s = self._due_s()
        if due_s is not None and time.monotonic() >= due_s:
            self._tick()
