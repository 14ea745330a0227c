"""A rank's connection to the hub: one thread that sleeps until something comes, and senders from
any."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from hydroslurm.coordination.frames import BadFrame, pack
from hydroslurm.coordination.messages import BadMessage, check_from_hub
from hydroslurm.coordination.search import Connection
from hydroslurm.errors import HubLost

_READ_BYTES = 1 << 18


class CoordinatorChannel:
    """Sends at once, and hands what comes to one function, in a thread of its own.

    Nothing is imported and no lock of a training thread is taken here: it has to go on while that
    is parked.
    """

    def __init__(
        self,
        connection: Connection,
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
        self._connection = connection.socket
        self._sealer, self._unsealer = connection.sealer, connection.unsealer
        self._first = connection.first
        self._hear = hear
        self._due_s = due_s
        self._tick = tick
        self._sending = threading.Lock()
        self._closed = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._watch = select.poll()  # select() cannot look at descriptors above 1023
        self._watch.register(self._connection, select.POLLIN)
        self._watch.register(self._wake_read, select.POLLIN)

    def send(self, message: Any) -> None:
        """Send one message; from any thread.

        Raises:
            HubLost: the hub is gone.
        """
        body = pack(message)
        try:
            with self._sending:  # frames are counted
                self._connection.sendall(self._sealer.seal(body))
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

    def run(self) -> None:
        """The thread; until :meth:`close`.

        Raises:
            HubLost: the hub is gone.
        """
        try:
            for message in self._first:
                self._hear(check_from_hub(message))
            while not self._closed:
                self._wait()
        except (OSError, BadFrame, BadMessage, HubLost) as error:
            if not self._closed:
                raise HubLost(f"what connects the ranks of this job is gone ({error})") from error
        finally:
            for end in (self._connection, self._wake_read, self._wake_write):
                end.close()

    def _wait(self) -> None:
        due_s = self._due_s()
        left_ms = None if due_s is None else max(0.0, due_s - time.monotonic()) * 1e3
        ready = {fd for fd, _ in self._watch.poll(left_ms)}
        if self._wake_read.fileno() in ready:
            self._wake_read.recv(4096)
        if self._connection.fileno() in ready:
            data = self._connection.recv(_READ_BYTES)
            if not data:
                raise OSError("closed by the hub")
            for message in self._unsealer.feed(data):
                self._hear(check_from_hub(message))
        due_s = self._due_s()
        if due_s is not None and time.monotonic() >= due_s:
            self._tick()
