"""How the first node of a job step is reached: by its name, else by the address that Slurm has.

Nodes of clouds, containers and dev clusters often have names that do not resolve.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import MutableMapping
from dataclasses import replace

from hydroslurm.coordination.world import World
from hydroslurm.errors import CoordinatorLost, SlurmError

LOOK_UP_S = 30.0
"""How long to retry a name server that does not answer; booting nodes have none yet."""


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
    from hydroslurm.slurm.refusals import RetryPolicy

    # not pyslurm: it would stay in the process of the training
    client = open_client("commands", retry_policy=RetryPolicy(give_up_after_s=30.0))
    return client.node_address(host)
