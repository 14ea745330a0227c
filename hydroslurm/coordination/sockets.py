"""Sockets as ranks and the coordinator use them: options, where to listen, how many to allow."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Sequence


def configure_socket(connection: socket.socket) -> None:
    """Send small messages at once, and notice a peer whose node has vanished. A process that is
    only stopped keeps its connection, for its kernel answers."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(host: str, ports: Sequence[int]) -> socket.socket:
    """A listening socket at the first port that is free, reachable as ``host``, and at no other
    address of this machine where that can be told.

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
    """Where others reach it. A name that is loopback here may be another address elsewhere: Debian
    gives a machine's own name 127.0.1.1; and one that does not resolve here may do so there."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return "0.0.0.0"
    return address if address == host or not address.startswith("127.") else "0.0.0.0"


def allow_descriptors(wanted: int) -> None:
    """Raise the limit on open files to the hard limit.

    Raises:
        OSError: the hard limit is too low; the message says what to change.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise OSError(
            errno.EMFILE,
            f"so many ranks need {wanted} open files, and this node allows {hard} (ulimit -Hn). "
            "Raise LimitNOFILE= of slurmd, and the limit of the shell that submits where "
            "PropagateResourceLimits hands it on",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
