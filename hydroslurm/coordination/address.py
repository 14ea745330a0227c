"""Where the first node of a job step is reached: by its name, else by the address that Slurm has.

The nodes of clouds, containers and dev clusters often have names that nothing can look up.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import MutableMapping
from dataclasses import replace

from hydroslurm.coordination.world import World
from hydroslurm.errors import HubLost, SlurmError

LOOK_UP_S = 30.0
"""How long a name server that does not answer is asked again; nodes that boot have none yet."""


def settle_address(world: World, environ: MutableMapping[str, str]) -> World:
    """Set MASTER_ADDR, unless somebody has, to what the first node can be reached by, where its
    name does not resolve; the world with that host.

    Raises:
        HubLost: it cannot be reached from here, which takes a minute or two to find out; says what
            to set.
    """
    if world.world_size == 1 or environ.get("MASTER_ADDR"):
        return world
    address, failure = _look_up(world.host)
    if failure:
        raise HubLost(failure)
    if address != world.host:
        for name, value in meeting_place(address).items():
            environ.setdefault(name, value)
    return replace(world, host=address)


def meeting_place(address: str) -> dict[str, str]:
    """The variables that have torch meet at an address that Slurm knows."""
    if not address.startswith("127."):
        return {"MASTER_ADDR": address}
    # a cluster on one machine: gloo would look for an interface by the machine's name
    return {"MASTER_ADDR": address, "GLOO_SOCKET_IFNAME": "lo"}


def located(world: World) -> World:
    """The world with a host that can be reached from here.

    Raises:
        HubLost: as :func:`settle_address`; never on the first rank, which others may find where it
            cannot look itself up.
    """
    address, failure = _look_up(world.host)
    if failure and world.rank:
        raise HubLost(failure)
    return replace(world, host=address)


@functools.cache
def _look_up(host: str) -> tuple[str, str]:
    """``host`` where it resolves, else the NodeAddr of Slurm's node of that name, and no words;
    where neither can be used ``host``, and why. Only the second way asks slurmctld."""
    failure = _failure(host)
    if failure is None:
        return host, ""
    try:
        address = _slurms_address(host)
        seen = f"neither does {address}, which is Slurm's address for it (NodeAddr)"
        if address != host and _failure(address) is None:
            return address, ""
    except SlurmError as error:
        seen = f"Slurm does not tell its address: {error}"
    return host, (
        f"the first node of this job step cannot be reached by its name: {host} does not resolve "
        f"here ({failure}); {seen}. Set MASTER_ADDR to an address of {host} that all nodes reach, "
        "as in: srun --export=ALL,MASTER_ADDR=10.0.0.7"
    )


def _failure(name: str) -> str | None:
    """Why a name does not resolve; None where it does."""
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
    from hydroslurm.slurm.retry import Patience

    # not pyslurm: it would stay in the process of the training
    client = open_client("commands", patience=Patience(give_up_after_s=30.0))
    return client.node_address(host)
