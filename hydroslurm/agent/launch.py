"""From torchrun's arguments to the exit status of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydroslurm.agent.defaults import meeting
from hydroslurm.agent.node import Node
from hydroslurm.events import EventKind


def run_agent(arguments: Sequence[str], *, environ: Mapping[str, str]) -> int:
    """Start workers as torchrun would, and hand Slurm's signals on to them.

    Args:
        arguments: torchrun's. In a job step of several tasks that name no rendezvous, the tasks
            meet at a store of the first one.
        environ: SLURM_*, HYDROSLURM_*. Torch reads ``os.environ`` itself.

    Returns:
        The status of the node: 0; 75, 93 or 143 as in :mod:`hydroslurm.exitcodes` when the workers
        have left on purpose.

    Raises:
        SystemExit: wrong arguments; torchrun has printed what is wrong.
        UsageError: a variable has a value that it never has.
        ChildFailedError: torch's: workers failed for good.
    """
    node = Node(environ)
    where = meeting(environ)
    with node.listening():
        # seconds, in which a signal must not kill already
        from hydroslurm.agent import elastic

        status: int | None = None
        try:
            status = elastic.launch(list(arguments), node=node, where=where)
        finally:
            node.log.record(EventKind.AGENT_LEFT, {"status": status})
        node.log.say(f"leaves with status {status}")
        return status
