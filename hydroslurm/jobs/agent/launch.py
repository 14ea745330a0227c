"""From torchrun's arguments to the exit status of a node."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from hydroslurm.coordination.network import set_master_addr
from hydroslurm.coordination.rendezvous import step_key
from hydroslurm.coordination.secret import key_from
from hydroslurm.core.events import EventKind
from hydroslurm.errors import RanksError
from hydroslurm.jobs.agent.node import Node
from hydroslurm.jobs.agent.rendezvous import agents, find_rendezvous


def run_agent(arguments: Sequence[str], *, environ: MutableMapping[str, str]) -> int:
    """Start workers as torchrun would, and hand Slurm's signals on to them.

    Args:
        arguments: torchrun's. In a job step of several tasks that name no rendezvous, the tasks
            meet at a store of the first one.
        environ: SLURM_*, HYDROSLURM_*; MASTER_ADDR is set in it where the first node's name does
            not resolve. Torch reads ``os.environ`` itself.

    Returns:
        The status of the node: 0; 75, 93 or 143 as in :mod:`hydroslurm.core.exitcodes` when the
        workers have left on purpose; 2, 126 or 127 when there is no such script or program; else
        that of the first worker that failed, 128 + N where a signal killed it.

    Raises:
        SystemExit: wrong arguments; torchrun has printed what is wrong.
        UsageError: a variable has a value that it never has.
    """
    node = Node(environ)
    with node.listening():
        key = _shared_key(environ, node)
        where = find_rendezvous(environ, key=key)
        # seconds, in which a signal must not kill already
        from hydroslurm.jobs.agent import elastic

        status: int | None = None
        try:
            status = elastic.launch(list(arguments), node=node, where=where, key=key)
        finally:
            node.log.record(EventKind.AGENT_LEFT, {"status": status})
        node.log.say(f"leaves with status {status}")
        return status


def _shared_key(environ: MutableMapping[str, str], node: Node) -> bytes | None:
    """The key of the agents; None for a single one, and where they have none: their workers then
    look for one themselves, and say what is missing. Where they meet is settled on the way."""
    key, world = key_from(environ), agents(environ)
    if world is None:
        return key
    try:
        world = set_master_addr(world, environ)
        return key or step_key(world, environ, stop=node.stop_asked.is_set)
    except RanksError as error:
        if not node.stop_asked.is_set():
            node.log.say(str(error), warning=True)
        return key
