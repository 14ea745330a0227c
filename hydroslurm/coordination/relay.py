"""The relay of a node: the coordinator has one connection for all ranks of a node, not one each.

    rank -> relay         "reach": which coordinator, and who the rank is
    relay -> rank         "reached", once the relay is connected there
    afterwards            the rank and the coordinator talk as if nobody were between them

``hydroslurm agent`` has one, in a thread. It authenticates the ranks of its node and itself to the
coordinator with the key of the workers, exactly as a rank does, and it interprets nothing but
"reach": what a rank sends travels on as bytes, which the coordinator checks as it checks those of
any rank, and a message for several ranks comes once. A rank that disconnects is reported, and a
relay that is gone is, for the coordinator, the end of all its ranks: it goes with the agent, and so
do the workers.

The way is longer by one process, so small worlds do without: see :data:`RELAY_RANKS`.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hydroslurm.coordination.channel import Connection, connect, find_coordinator
from hydroslurm.coordination.frames import BadFrame, pack, unpack, unwrap_ranks, wrap_up
from hydroslurm.coordination.messages import BadMessage, check_from_coordinator, check_to_relay
from hydroslurm.coordination.network import configure_socket, listen
from hydroslurm.coordination.peers import Authenticator, Packed, PeerConnection
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.server import Server
from hydroslurm.coordination.world import LOOPBACK, World
from hydroslurm.errors import UsageError
from hydroslurm.slurm.munge import MungeError

RELAY_ENV = "HYDROSLURM_RELAY"
"""Set by ``hydroslurm agent`` for its workers: the port of the relay on this node."""
RELAY_RANKS_ENV = "HYDROSLURM_RELAY_RANKS"
RELAY_RANKS = 256
"""From this world size on a node's ranks share a connection; HYDROSLURM_RELAY_RANKS changes it."""
SEARCH_S = 600.0
"""For a coordinator that a rank has named; a rank that gives up sooner ends the search."""
POLL_S = 0.2
FRAME_BYTES = 1 << 20
"""Of what ranks have sent meanwhile, in one frame to the coordinator."""


@dataclass(eq=False)
class _Upstream:
    """The connection to one coordinator, and the ranks that want it.

    Attributes:
        peer: None until the coordinator has answered.
        found: the search, while it is under way.
        ranks: connected here.
        waiting: bodies that are not sent yet, with their ranks.
        to: the ranks that the next body from the coordinator is for; None before it names them.
        is_given_up: nobody waits for the search any more.
    """

    incarnation_id: str
    found: Future[Connection]
    peer: PeerConnection | None = None
    is_ready: bool = False
    ranks: dict[int, PeerConnection] = field(default_factory=dict)
    waiting: list[tuple[int, bytes]] = field(default_factory=list)
    to: tuple[int, ...] | None = None
    is_given_up: bool = False


class Relay(Server):
    """Carries the messages of this node's ranks, in the thread that calls :meth:`run`.

    Attributes:
        port: where it listens, on the loopback address.
    """

    def __init__(self, key: bytes) -> None:
        """
        Args:
            key: of the ranks.

        Raises:
            OSError: no port is free.
        """
        listener = listen(LOOPBACK, [0])
        super().__init__(
            listener, Authenticator(key=key.hex(), attempt=secrets.token_hex(8), munge_socket=None)
        )
        self.port: int = listener.getsockname()[1]
        self._key = key
        self._closed = False
        self._thread = threading.Thread(target=self.run, name="hydroslurm-relay", daemon=True)
        self._searches = ThreadPoolExecutor(2, thread_name_prefix="hydroslurm-relay-search")
        self._upstreams: dict[str, _Upstream] = {}
        self._of_peer: dict[PeerConnection, tuple[_Upstream, int | None]] = {}

    def start(self) -> None:
        """Run in a thread of its own, until :meth:`stop` or the end of the process."""
        self._thread.start()

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        while not self._closed:
            self.serve_once()
        for upstream in self._upstreams.values():
            upstream.is_given_up = True
        self._searches.shutdown(wait=False, cancel_futures=True)
        self.close()

    def stop(self) -> None:
        """End all connections; from any other thread."""
        self._closed = True
        self._authenticator.wake()
        self._thread.join()

    def on_round(self) -> None:
        for upstream in list(self._upstreams.values()):
            self._forward(upstream)

    # --- from the ranks

    def on_body(self, peer: PeerConnection, body: bytes) -> None:
        upstream, rank = self._of_peer.get(peer, (None, None))
        if upstream is None:
            self._reach(peer, body)
        elif rank is None:
            self._from_coordinator(upstream, body)
        elif body:
            upstream.waiting.append((rank, body))
        else:
            raise BadMessage("an empty message")

    def on_drop(self, peer: PeerConnection) -> None:
        upstream, rank = self._of_peer.pop(peer, (None, None))
        if upstream is None:
            return
        if rank is None:  # the coordinator is gone
            self._end(upstream)
        elif upstream.ranks.get(rank) is peer:
            del upstream.ranks[rank]
            if upstream.is_ready:
                upstream.waiting.append((rank, b""))
            elif not upstream.ranks:
                self._end(upstream)

    def _reach(self, peer: PeerConnection, body: bytes) -> None:
        """A rank says which coordinator it belongs to; the first one has it looked for."""
        told = check_to_relay(unpack(body))
        incarnation_id, rank = told["incarnation_id"], told["rank"]
        upstream = self._upstreams.get(incarnation_id)
        if upstream is None:
            upstream = self._search(incarnation_id, host=told["host"], is_near=told["is_near"])
        if rank in upstream.ranks:
            raise BadMessage(f"rank {rank} is here already")
        peer.has_joined = True
        upstream.ranks[rank] = peer
        self._of_peer[peer] = (upstream, rank)
        if upstream.is_ready:
            self._write(peer, Packed(pack({"type": "reached"})))

    # --- to and from a coordinator

    def _search(self, incarnation_id: str, *, host: str, is_near: bool) -> _Upstream:
        # rank 0 asks on the loopback address too, and so does the relay beside it
        world = World(
            rank=0 if is_near else 1, world_size=2, host=host, incarnation_id=incarnation_id
        )
        upstream = _Upstream(incarnation_id, Future())
        upstream.found = self._searches.submit(
            find_coordinator,
            world,
            Secret("environment", self._key),
            ports=world.coordinator_ports(self._key),
            timeout_s=SEARCH_S,
            stop=lambda: upstream.is_given_up,
        )
        upstream.found.add_done_callback(lambda found: self._on_found(upstream, found))
        self._upstreams[incarnation_id] = upstream
        return upstream

    def _on_found(self, upstream: _Upstream, found: Future[Connection]) -> None:
        """In the thread of the search."""
        if upstream.is_given_up and not found.cancelled() and found.exception() is None:
            found.result().socket.close()
        self._authenticator.wake()

    def _forward(self, upstream: _Upstream) -> None:
        """Send what the ranks have said since the last time."""
        if upstream.peer is None:
            self._connect(upstream)
        if not upstream.is_ready or upstream.peer is None:
            return
        while upstream.waiting:
            items: list[tuple[int, bytes]] = []
            size_bytes = 0
            for rank, body in upstream.waiting:
                if items and size_bytes + len(body) > FRAME_BYTES:
                    break
                items.append((rank, body))
                size_bytes += len(body)
            del upstream.waiting[: len(items)]
            self._write(upstream.peer, Packed(wrap_up(items)))
        if not upstream.ranks:
            self.flush(upstream.peer)  # the last words of the last rank
            if not upstream.peer.has_unsent:
                self._end(upstream)

    def _connect(self, upstream: _Upstream) -> None:
        """Take the result of the search, if there is one."""
        if not upstream.found.done():
            return
        try:
            connection = upstream.found.result()
            configure_socket(connection.socket)
            peer = upstream.peer = PeerConnection(connection.socket)
            peer.use(sealer=connection.sealer, unsealer=connection.unsealer)
            peer.has_joined = True
            self._of_peer[peer] = (upstream, None)
            self.adopt(peer)
            hello = {"type": "relay", "incarnation_id": upstream.incarnation_id}
            self._write(peer, Packed(pack(hello)))
        except Exception:  # whatever it is, the ranks try without the relay, and say what they see
            self._end(upstream)

    def _from_coordinator(self, upstream: _Upstream, body: bytes) -> None:
        if not upstream.is_ready:
            if check_from_coordinator(unpack(body))["type"] != "reached":
                raise BadMessage("the coordinator does not answer as one")
            upstream.is_ready = True
            packed = Packed(body)
            for peer in list(upstream.ranks.values()):
                self._write(peer, packed)
            return
        if upstream.to is None:
            upstream.to = unwrap_ranks(body)
            return
        ranks, upstream.to = upstream.to, None
        packed = Packed(body)
        for rank in ranks:
            rank_peer = upstream.ranks.get(rank)
            if rank_peer is not None and body:
                self._write(rank_peer, packed)
            elif rank_peer is not None:
                del upstream.ranks[rank]
                self.drop(rank_peer)

    def _write(self, peer: PeerConnection, packed: Packed) -> None:
        try:
            self.send(peer, packed)
        except ValueError:
            self.drop(peer)

    def _end(self, upstream: _Upstream) -> None:
        """Nothing connects these ranks any more; they look for the next coordinator."""
        if self._upstreams.pop(upstream.incarnation_id, None) is None:
            return
        upstream.is_given_up = True
        if upstream.peer is not None:
            self._of_peer.pop(upstream.peer, None)
            self.drop(upstream.peer)
        for peer in list(upstream.ranks.values()):
            self.drop(peer)


def is_wanted(environ: Mapping[str, str], *, world_size: int, local_world_size: int) -> bool:
    """Whether the ranks of a node are to share a connection.

    Raises:
        UsageError: HYDROSLURM_RELAY_RANKS is no number.
    """
    least = _number(environ, RELAY_RANKS_ENV, default=RELAY_RANKS)
    return local_world_size > 1 and world_size >= least


def find_through_relay(
    world: World,
    secret: Secret,
    environ: Mapping[str, str],
    *,
    timeout_s: float,
    stop: Callable[[], bool],
) -> Connection | None:
    """Connect as :func:`hydroslurm.coordination.channel.find_coordinator` does, through the relay
    of this node. None if there is no relay, it does not reach the coordinator within ``timeout_s``,
    or ``stop()`` returned True: a rank can always connect by itself.

    Raises:
        UsageError: HYDROSLURM_RELAY is no port.
    """
    port = _number(environ, RELAY_ENV, default=0)
    if not port or world.rank == 0 or secret.source != "environment":
        return None
    connection = None
    try:
        connection = connect([(LOOPBACK, port)], world, secret)
        if connection is not None:
            _wait_until_reached(connection, world, timeout_s=timeout_s, stop=stop)
    except (OSError, BadFrame, BadMessage, MungeError):
        if connection is not None:
            connection.socket.close()
        return None
    return connection


def _wait_until_reached(
    connection: Connection, world: World, *, timeout_s: float, stop: Callable[[], bool]
) -> None:
    reach = {
        "type": "reach",
        "incarnation_id": world.incarnation_id,
        "rank": world.rank,
        "host": world.host,
        "is_near": world.rank == world.local_rank,
    }
    sock, until_s = connection.socket, time.monotonic() + timeout_s
    sock.sendall(connection.sealer.seal(pack(reach)))
    sock.settimeout(POLL_S)
    answers: list[Any] = list(connection.first)
    while not answers:
        if stop() or time.monotonic() > until_s:
            raise TimeoutError
        with contextlib.suppress(TimeoutError):
            data = sock.recv(1 << 16)
            if not data:
                raise OSError("closed by the relay")
            answers = connection.unsealer.feed(data)
    if check_from_coordinator(answers[0])["type"] != "reached" or len(answers) > 1:
        raise BadMessage("a relay says first that it has reached the coordinator")
    sock.settimeout(None)


def _number(environ: Mapping[str, str], name: str, *, default: int) -> int:
    text = environ.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) < 8):
        raise UsageError(f"{name}={text!r} is not a number of 0 or more; unset it for {default}")
    return int(text)
