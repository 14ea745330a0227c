"""A rank's connection to the coordinator: find it, join it, send to it and receive from it."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydroslurm.coordination.authentication import GreetingFailed, RankGreeting
from hydroslurm.coordination.frames import BadFrame, Sealer, Unsealer, pack
from hydroslurm.coordination.messages import BadMessage, Message, check_from_coordinator
from hydroslurm.coordination.network import configure_socket, located
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.world import LOOPBACK, World
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.errors import CoordinatorLost, StaleRank, UntrustedFile
from hydroslurm.slurm.munge import MungeError

CONNECT_S = 5.0
"""For all candidates together: a listener that sends nothing costs no more."""
WELCOME_S = 60.0
"""A coordinator that thousands join at once takes a while."""
RETRY_S = 0.2
_READ_BYTES = 1 << 18


@dataclass(frozen=True, eq=False)
class Connection:
    """A connection on which the coordinator has authenticated.

    Attributes:
        sealer, unsealer: for what is sent, and for what arrives.
        first: messages that have arrived already.
    """

    socket: socket.socket
    key: bytes
    sealer: Sealer
    unsealer: Unsealer
    first: Sequence[Any] = ()


def find_coordinator(
    world: World,
    secret: Secret,
    *,
    ports: Sequence[int],
    timeout_s: float,
    stop: Callable[[], bool] = lambda: False,
) -> Connection:
    """Connect: ask at all ports until the coordinator of this attempt authenticates.

    Whoever cannot learns nothing. A rank that is to stay calls :func:`join_coordinator` next.

    Raises:
        CoordinatorLost: no such coordinator within ``timeout_s``, ``stop()`` returned True, or the
            first node's name does not resolve.
    """
    world = located(world)
    near = LOOPBACK if world.rank == 0 and world.local_rank == 0 else world.host
    candidates = [(host, port) for port in ports for host in dict.fromkeys((near, world.host))]
    clock, seen = AwakeClock(2 * CONNECT_S), "nobody listens"
    deadline_s = clock.now_s() + timeout_s
    while clock.now_s() < deadline_s and not stop():
        try:
            search = _Search(world, secret)
            if (found := search.run(candidates)) is not None:
                return found
            seen = search.seen or seen
        except (OSError, MungeError, UntrustedFile) as error:
            seen = str(error)
        threading.Event().wait(RETRY_S)
    raise CoordinatorLost(
        f"rank {world.rank} did not find the other ranks within {timeout_s:g} s; the last it saw: "
        f"{seen}. Rank 0 listens on {world.host} at one of the ports {min(ports)} to {max(ports)}: "
        "has it started, and may the nodes connect there? MASTER_ADDR names another host"
    )


def connect(
    candidates: Sequence[tuple[str, int]], world: World, secret: Secret
) -> Connection | None:
    """Ask once at these addresses; the first that authenticates, None if none does.

    Raises:
        OSError, MungeError, UntrustedFile: there is nothing to ask with.
    """
    return _Search(world, secret).run(candidates)


def join_coordinator(connection: Connection, world: World, cut_off: Sequence[str]) -> Connection:
    """Join the other ranks of this attempt on a connection.

    Args:
        cut_off: operations that this rank had started at coordinators that are gone.

    Raises:
        StaleRank: the coordinator of this attempt refuses this rank.
        CoordinatorLost: it is gone, or belongs to another attempt.
    """
    hello = {
        "type": "join",
        "incarnation_id": world.incarnation_id,
        "rank": world.rank,
        "world_size": world.world_size,
        "cut_off": list(cut_off),
    }
    try:
        first, joined = ask_first(connection, hello, check=check_from_coordinator)
    except (OSError, BadFrame, BadMessage) as error:
        raise CoordinatorLost(f"the coordinator did not let this rank join ({error})") from error
    if first["type"] != "welcome":
        joined.socket.close()
        reason = f"this process may not join the ranks of its job: {first['reason']}"
        raise StaleRank(reason) if first["same_incarnation"] else CoordinatorLost(reason)
    configure_socket(joined.socket)
    return joined


def ask_first(
    connection: Connection,
    message: Message,
    *,
    check: Callable[[Any], Message],
    timeout_s: float = WELCOME_S,
) -> tuple[Message, Connection]:
    """Send the first message on a connection, and wait for the first that comes.

    Returns:
        That one, checked, and the connection behind it.

    Raises:
        OSError: nothing came, or the other end is gone; the connection is closed then.
        BadFrame, BadMessage: what came is no such message; as well.
    """
    sock = connection.socket
    try:
        sock.settimeout(timeout_s)
        sock.sendall(connection.sealer.seal(pack(message)))
        messages = list(connection.first)
        while not messages:
            data = sock.recv(1 << 16)
            if not data:
                raise OSError("closed by the coordinator")
            messages = connection.unsealer.feed(data)
        first = check(messages[0])
        sock.settimeout(None)
    except (OSError, BadFrame, BadMessage):
        sock.close()
        raise
    return first, replace(connection, first=messages[1:])


class CoordinatorChannel:
    """Sends at once, and passes each message that arrives to one function, in its own thread.

    Imports nothing and takes no lock of a training thread: it has to work while those are parked.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        on_message: Callable[[Message], None],
        due_s: Callable[[], float | None],
        tick: Callable[[], None],
        check: Callable[[Any], Message] = check_from_coordinator,
    ) -> None:
        """
        Args:
            on_message: receives each message that ``check`` lets pass.
            due_s: when ``tick`` is due (``time.monotonic()``), None for not at all.
            tick: called then.
        """
        self._connection = connection.socket
        self._sealer, self._unsealer = connection.sealer, connection.unsealer
        self._first = connection.first
        self._on_message = on_message
        self._due_s = due_s
        self._tick = tick
        self._check = check
        self._send_lock = threading.Lock()
        self._closed = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._poll = select.poll()  # select() cannot look at descriptors above 1023
        self._poll.register(self._connection, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)

    def send(self, message: Any) -> None:
        """Send one message; from any thread.

        Raises:
            CoordinatorLost: the coordinator is gone.
        """
        body = pack(message)
        try:
            with self._send_lock:  # frames are counted
                self._connection.sendall(self._sealer.seal(body))
        except OSError as error:
            raise CoordinatorLost(
                f"what connects the ranks of this job is gone ({error})"
            ) from error

    @property
    def is_full(self) -> bool:
        """Whether so much is unread at the other end that sending more may wait for it."""
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        return not poll.poll(0)

    def wake(self) -> None:
        """Have ``due_s`` called again."""
        with contextlib.suppress(OSError):
            self._wake_write.send(b".")

    def close(self) -> None:
        """End the thread soon."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self.wake()

    def run(self) -> None:
        """Receive until :meth:`close`; the body of the thread.

        Raises:
            CoordinatorLost: the coordinator is gone.
        """
        try:
            for message in self._first:
                self._on_message(self._check(message))
            while not self._closed:
                self._receive()
        except (OSError, BadFrame, BadMessage, CoordinatorLost) as error:
            if not self._closed:
                raise CoordinatorLost(
                    f"what connects the ranks of this job is gone ({error})"
                ) from error
        finally:
            for end in (self._connection, self._wake_read, self._wake_write):
                end.close()

    def _receive(self) -> None:
        due_s = self._due_s()
        left_ms = None if due_s is None else max(0.0, due_s - time.monotonic()) * 1e3
        ready = {fd for fd, _ in self._poll.poll(left_ms)}
        if self._wake_read.fileno() in ready:
            self._wake_read.recv(4096)
        if self._connection.fileno() in ready:
            data = self._connection.recv(_READ_BYTES)
            if not data:
                raise OSError("closed by the coordinator")
            for message in self._unsealer.feed(data):
                self._on_message(self._check(message))
        due_s = self._due_s()
        if due_s is not None and time.monotonic() >= due_s:
            self._tick()


class _Search:
    """Asks at several addresses at the same time; anybody may listen at the others."""

    def __init__(self, world: World, secret: Secret) -> None:
        self._world = world
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._asked: dict[socket.socket, str] = {}
        self._greetings: dict[socket.socket, RankGreeting] = {}
        self.seen = ""

    def run(self, candidates: Sequence[tuple[str, int]]) -> Connection | None:
        """The first that authenticates; None if none has within :data:`CONNECT_S`."""
        try:
            for host, port in candidates:
                self._ask(host, port)
            deadline_s = time.monotonic() + CONNECT_S
            while self._asked and (left_s := deadline_s - time.monotonic()) > 0:
                for key, _ in self._selector.select(left_s):
                    if (found := self._continue(key.data)) is not None:
                        return found
            return None
        finally:
            for sock in list(self._asked):
                self._give_up(sock, "")
            self._selector.close()

    def _ask(self, host: str, port: int) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._asked[sock] = f"{host}:{port}"
        self._selector.register(sock, selectors.EVENT_WRITE, sock)
        try:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect((host, port))
        except OSError as error:
            self._give_up(sock, str(error))

    def _continue(self, sock: socket.socket) -> Connection | None:
        try:
            greeting = self._greetings.get(sock)
            if greeting is None:
                self._connected(sock)
                return None
            data = sock.recv(1 << 16)
            if not data:
                raise OSError("closed; not the coordinator of this job, or it refuses this rank")
            proof = greeting.feed(data)
            if proof is None:
                return None
            sock.setblocking(True)
            sock.sendall(proof)
            made = _connection(sock, greeting)
        except (OSError, GreetingFailed, BadFrame, MungeError) as error:
            self._give_up(sock, str(error))
            return None
        self._selector.unregister(sock)
        del self._asked[sock]
        return made

    def _connected(self, sock: socket.socket) -> None:
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))
        greeting = self._secret.greeting(self._world)
        if greeting is None:
            raise OSError("rank 0 has not written the ranks' key yet")
        self._greetings[sock] = greeting
        sock.setblocking(True)
        sock.sendall(greeting.hello)  # a few hundred bytes, on a connection that is empty
        sock.setblocking(False)
        self._selector.modify(sock, selectors.EVENT_READ, sock)

    def _give_up(self, sock: socket.socket, why: str) -> None:
        self._selector.unregister(sock)
        where = self._asked.pop(sock)
        sock.close()
        self.seen = f"{where}: {why}" if why else self.seen


def _connection(sock: socket.socket, greeting: RankGreeting) -> Connection:
    session, key = greeting.session, greeting.key
    assert session is not None
    assert key is not None
    unsealer = Unsealer(session.to_rank)
    first = unsealer.feed(session.rest)
    return Connection(sock, key, Sealer(session.to_coordinator), unsealer, first)
