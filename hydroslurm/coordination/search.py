"""Finding the hub and joining it, on every rank."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hydroslurm.coordination.address import located
from hydroslurm.coordination.frames import BadFrame, Sealer, Unsealer, pack
from hydroslurm.coordination.greeting import GreetingFailed, RankGreeting
from hydroslurm.coordination.messages import BadMessage, check_from_hub
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.sockets import make_ready
from hydroslurm.coordination.world import LOOPBACK, World
from hydroslurm.errors import HubLost, StaleRank, UntrustedFile
from hydroslurm.slurm.munge import MungeError

CONNECT_S = 5.0
"""For all candidates together: whoever listens at one of them and says nothing costs no more."""
WELCOME_S = 60.0
"""A hub that is joined by thousands at once takes a while."""
RETRY_S = 0.2


@dataclass(frozen=True, eq=False)
class Connection:
    """One that the hub has proved itself on.

    Attributes:
        sealer, unsealer: of what is sent, and of what comes.
        first: messages that have come already.
    """

    socket: socket.socket
    key: bytes
    sealer: Sealer
    unsealer: Unsealer
    first: Sequence[Any] = ()


def find_hub(
    world: World,
    secret: Secret,
    *,
    ports: Sequence[int],
    timeout_s: float,
    stop: Callable[[], bool] = lambda: False,
) -> Connection:
    """Connect: ask at all ports until the hub of this attempt proves itself.

    Nothing is told to whoever cannot. ``join`` is for a rank that is to stay.

    Raises:
        HubLost: no such hub within ``timeout_s``, ``stop()`` said so, or the first node's name
            leads nowhere.
    """
    world = located(world)
    near = LOOPBACK if world.rank == 0 and world.local_rank == 0 else world.host
    places = [(host, port) for port in ports for host in dict.fromkeys((near, world.host))]
    deadline_s, seen = time.monotonic() + timeout_s, "nobody listens"
    while time.monotonic() < deadline_s and not stop():
        try:
            with _Search(world, secret) as search:
                found = search.run(places)
            if found is not None:
                return found
            seen = search.seen or seen
        except (OSError, MungeError, UntrustedFile) as error:
            seen = str(error)
        threading.Event().wait(RETRY_S)
    raise HubLost(
        f"rank {world.rank} did not find the other ranks within {timeout_s:g} s; the last it saw: "
        f"{seen}. Rank 0 listens on {world.host} at one of the ports {min(ports)} to {max(ports)}: "
        "has it started, and may the nodes connect there? MASTER_ADDR names another host"
    )


def join_hub(connection: Connection, world: World, who: Any) -> Connection:
    """Join the other ranks of this attempt on a connection.

    Raises:
        StaleRank: the hub of this attempt will not have this rank.
        HubLost: it is gone, or is that of another attempt.
    """
    hello = {
        "do": "join",
        "life": world.life,
        "rank": world.rank,
        "world_size": world.world_size,
        "who": who,
    }
    line = connection.socket
    try:
        line.settimeout(WELCOME_S)
        line.sendall(connection.sealer.seal(pack(hello)))
        messages = list(connection.first)
        while not messages:
            data = line.recv(1 << 16)
            if not data:
                raise OSError("closed by the hub")
            messages = connection.unsealer.feed(data)
        first = check_from_hub(messages[0])
        line.settimeout(None)
    except (OSError, BadFrame, BadMessage) as error:
        line.close()
        raise HubLost(f"the hub of the ranks did not let this rank join ({error})") from error
    if first["say"] != "welcome":
        line.close()
        words = f"this process may not join the ranks of its job: {first.get('why')}"
        raise StaleRank(words) if first.get("ours") else HubLost(words)
    make_ready(line)
    return Connection(line, connection.key, connection.sealer, connection.unsealer, messages[1:])


class _Search:
    """Asks at several places at the same time; whoever listens at the others may be anybody."""

    def __init__(self, world: World, secret: Secret) -> None:
        self._world = world
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._asked: dict[socket.socket, str] = {}
        self._greetings: dict[socket.socket, RankGreeting] = {}
        self.seen = ""

    def __enter__(self) -> _Search:
        return self

    def __exit__(self, *_: object) -> None:
        for line in list(self._asked):
            self._give_up(line, "")
        self._selector.close()

    def run(self, places: Sequence[tuple[str, int]]) -> Connection | None:
        """The first that proves itself; None when nobody has within :data:`CONNECT_S`."""
        for host, port in places:
            self._ask(host, port)
        deadline_s = time.monotonic() + CONNECT_S
        while self._asked and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                found = self._hear(key.data)
                if found is not None:
                    return found
        return None

    def _ask(self, host: str, port: int) -> None:
        line = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._asked[line] = f"{host}:{port}"
        self._selector.register(line, selectors.EVENT_WRITE, line)
        try:
            line.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                line.connect((host, port))
        except OSError as error:
            self._give_up(line, str(error))

    def _hear(self, line: socket.socket) -> Connection | None:
        try:
            greeting = self._greetings.get(line)
            if greeting is None:
                self._connected(line)
                return None
            data = line.recv(1 << 16)
            if not data:
                raise OSError("closed; not the hub of this job, or it will not have this rank")
            proof = greeting.feed(data)
            if proof is None:
                return None
            line.setblocking(True)
            line.sendall(proof)
            made = _open(line, greeting)
        except (OSError, GreetingFailed, BadFrame, MungeError) as error:
            self._give_up(line, str(error))
            return None
        self._selector.unregister(line)
        del self._asked[line]
        return made

    def _connected(self, line: socket.socket) -> None:
        if code := line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))
        greeting = self._secret.greeting(self._world.life)
        if greeting is None:
            raise OSError("rank 0 has not written the ranks' key yet")
        self._greetings[line] = greeting
        line.setblocking(True)
        line.sendall(greeting.hello)  # a few hundred bytes, on a connection that is empty
        line.setblocking(False)
        self._selector.modify(line, selectors.EVENT_READ, line)

    def _give_up(self, line: socket.socket, why: str) -> None:
        self._selector.unregister(line)
        where = self._asked.pop(line)
        line.close()
        self.seen = f"{where}: {why}" if why else self.seen


def _open(line: socket.socket, greeting: RankGreeting) -> Connection:
    channel, key = greeting.channel, greeting.key
    assert channel is not None
    assert key is not None
    unsealer = Unsealer(channel.to_rank)
    first = unsealer.feed(channel.rest)
    return Connection(line, key, Sealer(channel.to_hub), unsealer, first)
