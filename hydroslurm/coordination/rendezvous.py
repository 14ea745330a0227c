"""Where the ranks of a job step meet: the key that they share, and torch's own rendezvous.

Torch's store has no authentication: whoever reaches it can read and change what the ranks tell
each other. So it listens at the one address that is needed, and at a port that follows from the
key. That keeps most out. Another user of the same nodes can still find the port by trying all of
them: only nodes to yourself (``--exclusive``) keep that one out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from hydroslurm.coordination.address import settle_address
from hydroslurm.coordination.host import start_hub
from hydroslurm.coordination.search import find_hub
from hydroslurm.coordination.secret import find_secret, key_from
from hydroslurm.coordination.sockets import listen
from hydroslurm.coordination.world import World
from hydroslurm.core import registry
from hydroslurm.errors import RunFolderError
from hydroslurm.slurm import jobfolder

MEET_S = 600.0
"""As long as ranks look for each other: nodes that boot, images that are fetched."""

_store: Any = None
"""Torch's, on the first rank: it ends with this reference."""


def set_torch_environment(environ: MutableMapping[str, str] | None = None) -> World:
    """Give torch.distributed what ``init_process_group()`` reads, in ranks that srun has started.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. What is set
    already stays: torchrun's workers have all of it. MASTER_ADDR is the name of the first node, and
    the address that Slurm has for it where that name does not resolve. The port follows from the
    key of this attempt, so that neither ranks of an earlier one are met nor strangers expected;
    where the key is not in the environment, the ranks wait here until they have it from the first.
    That one opens torch's store, which then listens at MASTER_ADDR and nowhere else.

    Args:
        environ: changed in place, and nothing else is done; default: ``os.environ``.

    Raises:
        UsageError: a variable has a value that neither torchrun nor Slurm gives.
        NoSecret: several ranks, and nothing that they could prove their identity with.
        HubLost: the first rank did not come, or its node cannot be found.
    """
    ours = environ is None or environ is os.environ
    environ = os.environ if environ is None else environ
    world = World.from_environ(environ)
    if ours:
        world = settle_address(world, environ)
    chooses_port = world.world_size > 1 and not environ.get("MASTER_PORT")
    key = step_key(world, environ) if ours and chooses_port else key_from(environ)
    environ.setdefault("MASTER_ADDR", world.host)
    environ.setdefault("MASTER_PORT", str(world.torch_port(key)))
    environ.setdefault("RANK", str(world.rank))
    environ.setdefault("WORLD_SIZE", str(world.world_size))
    environ.setdefault("LOCAL_RANK", str(world.local_rank))
    environ.setdefault("LOCAL_WORLD_SIZE", str(world.local_world_size))
    if ours and chooses_port and world.rank == 0:
        _open_store(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), world.world_size)
    return world


def step_key(
    world: World, environ: Mapping[str, str], *, stop: Callable[[], bool] = lambda: False
) -> bytes:
    """The key of this attempt, which is the same for all its ranks; waits for it.

    Args:
        stop: asked while waiting; True gives up.

    Raises:
        NoSecret: there is no way to agree on one.
        HubLost: the first rank, which has it, did not come within :data:`MEET_S`.
    """
    secret = find_secret(world, environ, folder=key_folder(world, environ))
    if secret.source == "environment" or world.rank == 0:
        assert secret.key is not None
        if secret.source != "environment":
            start_hub(world, secret)
        return secret.key
    ports = world.hub_ports(secret.port_key)
    found = find_hub(world, secret, ports=ports, timeout_s=MEET_S, stop=stop)
    found.socket.close()
    return found.key


def key_folder(
    world: World, environ: Mapping[str, str], *, run_dir: str | os.PathLike[str] | None = None
) -> Path | None:
    """Where the ranks' key may lie in a file: in the run folder; without one, ranks of one machine
    have the folder there that is this user's own. None where there is neither.

    Args:
        run_dir: the run folder that was given, if one was.
    """
    if run_dir is not None:
        return Path(run_dir).absolute()
    run = jobfolder.from_environment(environ)
    if run is not None:
        return run.root
    if world.local_world_size == world.world_size:
        with contextlib.suppress(RunFolderError):
            return registry.folder(environ)
    return None


def _open_store(host: str, port: int, world_size: int) -> None:
    """Torch takes a store of its own process that is there already for the one it would open, and
    that one would listen at all addresses."""
    global _store
    from torch._C._distributed_c10d import TCPStore

    # should the port be taken, init_process_group() is about to say so
    with contextlib.suppress(OSError), listen(host, [port]) as listener:
        _store = TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
