"""TCP ports for one cluster: picked free, and kept so."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.devcluster.config import LOOPBACK, Ports

_LISTEN = "0A"
_LOOPBACK_HEX = ("0100007F", "00000000000000000000000001000000")


@dataclass(frozen=True)
class ReservedPorts:
    """Ports, and the bound sockets that keep them from everybody else.

    The sockets never listen and have SO_REUSEADDR set, as those of Slurm's daemons have: so a
    daemon can bind and listen on its port while it is still reserved, and there is no moment
    between in which another program, or a second cluster, could get it.
    """

    ports: Ports
    sockets: tuple[socket.socket, ...]

    def release(self) -> None:
        for held in self.sockets:
            held.close()


def reserve(nodes: int) -> ReservedPorts:
    """Reserve the ports of a cluster with so many nodes; the caller releases them."""
    held: list[socket.socket] = []
    for _ in range(nodes + 2):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((LOOPBACK, 0))
        held.append(one)
    numbers = [one.getsockname()[1] for one in held]
    return ReservedPorts(Ports(numbers[0], numbers[1], tuple(numbers[2:])), tuple(held))


def listening(port: int) -> bool:
    """Whether something listens on a port; nothing is sent to it."""
    return any(port == other for _, other in _listeners())


def open_to_others(ports: Iterable[int]) -> list[int]:
    """Those of the ports on which something listens beyond the loopback interface."""
    wanted = set(ports)
    return sorted(
        {port for address, port in _listeners() if port in wanted and address not in _LOOPBACK_HEX}
    )


def _listeners() -> Iterator[tuple[str, int]]:
    """Address (hexadecimal, as the kernel writes it) and port of each listening TCP socket."""
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        for fields in (line.split() for line in lines):
            if fields[3] == _LISTEN:
                address, _, port = fields[1].partition(":")
                yield address, int(port, 16)
