"""How ranks and the coordinator reach each other: the address of the first node, and sockets.

Nodes of clouds, containers and dev clusters often have names that do not resolve: then the address
that Slurm has is used.
"""

from __future__ import annotations

import errno
import functools
import resource
import socket
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hydroslurm.errors import CoordinatorLost, SlurmError

if TYPE_CHECKING:  # the coordinator starts sooner without it
    from hydroslurm.coordination.world import World

LOOK_UP_S = 30.0
"""Time for retrying a name server that does not answer; booting nodes have none yet."""


def set_master_addr(world: World, environ: MutableMapping[str, str]) -> World:
    """Set MASTER_ADDR to Slurm's address of the first node if that node's name does not resolve;
    return the world with the host that does. A MASTER_ADDR that is set already is kept.

    Raises:
        CoordinatorLost: the node cannot be reached from here, which takes a minute or two to find
            out; the message says what to set.
    """
    if world.world_size == 1 or environ.get("MASTER_ADDR"):
        return world
    address, failure = _look_up(world.host)
    if failure:
        raise CoordinatorLost(failure)
    if address != world.host:
        for name, value in rendezvous_environment(address).items():
            environ.setdefault(name, value)
    return replace(world, host=address)


def rendezvous_environment(address: str) -> dict[str, str]:
    """The variables that make torch's rendezvous use an address that Slurm knows."""
    if not address.startswith("127."):
        return {"MASTER_ADDR": address}
    # a cluster on one machine: gloo would look for an interface by the machine's name
    return {"MASTER_ADDR": address, "GLOO_SOCKET_IFNAME": "lo"}


def located(world: World) -> World:
    """Return the world with a host that can be reached from here.

    Raises:
        CoordinatorLost: as :func:`set_master_addr`; never on the first rank, which the others may
            find although it cannot look itself up.
    """
    address, failure = _look_up(world.host)
    if failure and world.rank:
        raise CoordinatorLost(failure)
    return replace(world, host=address)


def own_address(environ: Mapping[str, str]) -> str:
    """The address by which other nodes know this one; loopback where its name means nothing."""
    name = environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError:
        return "127.0.0.1"


def address_towards(host: str) -> str:
    """The address by which ``host``, and nodes that reach it, reach this one. Sends nothing.

    Raises:
        OSError: ``host`` does not resolve, or has no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        address = str(probe.getsockname()[0])
    return host if address.startswith("127.") else address  # both are on one machine


@functools.cache
def _look_up(host: str) -> tuple[str, str]:
    """``host`` if it resolves, else the NodeAddr of Slurm's node of that name, and no failure; if
    neither can be used ``host``, and why. Only the second way asks slurmctld."""
    failure = _failure(host)
    if failure is None:
        return host, ""
    try:
        address = _slurms_address(host)
        seen = f"neither does {address}, which is Slurm's address for it (NodeAddr)"
        if address != host and _failure(address) is None:
            return address, ""
    except SlurmError as error:
        seen = f"Slurm does not give its address: {error}"
    return host, (
        f"the first node of this job step cannot be reached by its name: {host} does not resolve "
        f"here ({failure}); {seen}. Set MASTER_ADDR to an address of {host} that all nodes reach, "
        "as in: srun --export=ALL,MASTER_ADDR=10.0.0.7"
    )


def _failure(name: str) -> str | None:
    """Why a name does not resolve; None if it does."""
    give_up_s = time.monotonic() + LOOK_UP_S
    while True:
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            if error.errno != socket.EAI_AGAIN or time.monotonic() > give_up_s:
                return str(error)
        except UnicodeError as error:
            return str(error)
        else:
            return None
        threading.Event().wait(1.0)


def _slurms_address(host: str) -> str:
    from hydroslurm.slurm.client import open_client
    from hydroslurm.slurm.programs import RetryPolicy

    # not pyslurm: it would stay in the process of the training
    client = open_client("commands", retry_policy=RetryPolicy(give_up_after_s=30.0))
    return client.node_address(host)


# --- sockets


GONE_S = 40
"""A peer is gone if its kernel acknowledges nothing for so long."""


def configure_socket(connection: socket.socket) -> None:
    """Send small messages at once, and notice within GONE_S a peer whose node has vanished: by
    keepalive, which does not fire while data is in flight, and by the user timeout, which does.

    A process that is only stopped keeps its connection, for its kernel answers, until what it is
    sent fills its receive buffer (64 KiB and more): send it no more than that unasked.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_S * 1000)


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
