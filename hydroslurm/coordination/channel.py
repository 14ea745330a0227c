"""A rank's connection to the coordinator: find it, join it, send to it and receive from it."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydroslurm.coordination.authentication import BadFrame, GreetingFailed, Session, pack
from hydroslurm.coordination.messages import BadMessage, Message, check_from_coordinator
from hydroslurm.coordination.network import configure_socket, located
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.world import LOOPBACK, World
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.errors import CoordinatorLost, StaleRank, UntrustedFile
from hydroslurm.slurm.munge import MungeError

CONNECT_S = 20.0
"""Time-out for all candidates together. With a latency of 2 s each way ARP takes 12 s; a silent
listener costs no more."""
WELCOME_S = 60.0
"""Time-out for the first answer: thousands of ranks may join at once."""
RETRY_S = 0.2
_READ_BYTES = 1 << 18


@dataclass(frozen=True, eq=False)
class Connection:
    """A connection on which the coordinator has authenticated.

    Attributes:
        session: seals what is sent, and unseals what arrives.
        first: messages that have arrived already.
    """

    socket: socket.socket
    session: Session
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

    A listener that cannot learns nothing. A rank that is to stay calls :func:`join_coordinator`
    next.

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
            found = connect(candidates, world, secret)
            if isinstance(found, Connection):
                return found
            seen = found or seen
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
) -> Connection | str:
    """Ask at several addresses at the same time, for anybody may listen at the others: the first
    that authenticates, or why the last has not; empty if none has answered in time.

    Raises:
        OSError, MungeError, UntrustedFile: there is nothing to ask with.
    """
    loop = asyncio.new_event_loop()  # asyncio.run() would take the handler of SIGINT
    try:
        return loop.run_until_complete(_first(candidates, world, secret))
    finally:
        loop.close()


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
    first, joined = ask_first(connection, hello, check=check_from_coordinator)
    if first["type"] != "welcome":
        joined.socket.close()
        reason = f"this process may not join the ranks of its job: {first['reason']}"
        raise StaleRank(reason) if first["same_incarnation"] else CoordinatorLost(reason)
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
        CoordinatorLost: no such message came, or the other end is gone; the connection is closed
            then.
    """
    sock = connection.socket
    try:
        configure_socket(sock)
        sock.settimeout(timeout_s)
        sock.sendall(connection.session.sealer.seal(pack(message)))
        messages = list(connection.first)
        while not messages:
            data = sock.recv(1 << 16)
            if not data:
                raise OSError("closed by the coordinator")
            messages = connection.session.unsealer.feed(data)
        first = check(messages[0])
        sock.settimeout(None)
    except (OSError, BadFrame, BadMessage) as error:
        sock.close()
        raise CoordinatorLost(f"the coordinator did not answer this process ({error})") from error
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
        self._session = connection.session
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
                self._connection.sendall(self._session.sealer.seal(body))
        except OSError as error:
            raise CoordinatorLost(
                f"what connects the ranks of this job is gone ({error})"
            ) from error

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
            for message in self._session.unsealer.feed(data):
                self._on_message(self._check(message))
        due_s = self._due_s()
        if due_s is not None and time.monotonic() >= due_s:
            self._tick()


async def _first(
    candidates: Sequence[tuple[str, int]], world: World, secret: Secret
) -> Connection | str:
    tasks = [asyncio.create_task(_ask(host, port, world, secret)) for host, port in candidates]
    found: Connection | str = ""
    try:
        for answer in asyncio.as_completed(tasks, timeout=CONNECT_S):
            found = await answer
            if isinstance(found, Connection):
                break
    except asyncio.TimeoutError:
        pass
    finally:
        for task in tasks:
            task.cancel()
        for made in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(made, Connection) and made is not found:
                made.socket.close()
    return found


async def _ask(host: str, port: int, world: World, secret: Secret) -> Connection | str:
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, (socket.gethostbyname(host), port))
        greeting = secret.greeting(world)
        if greeting is None:
            raise OSError("rank 0 has not written the ranks' key yet")
        await loop.sock_sendall(sock, greeting.hello)
        while greeting.session is None:
            data = await loop.sock_recv(sock, 1 << 16)
            if not data:
                raise OSError("closed; not the coordinator of this job, or it refuses this rank")
            await loop.sock_sendall(sock, greeting.feed(data))
        sock.setblocking(True)
        first = greeting.session.unsealer.feed(greeting.rest)
        return Connection(sock, greeting.session, first)
    except (OSError, GreetingFailed, BadFrame, MungeError) as error:
        sock.close()
        return f"{host}:{port}: {error}"
    except BaseException:  # UntrustedFile, or given up for another
        sock.close()
        raise
