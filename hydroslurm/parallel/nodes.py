"""Which ranks are on one node. Pure, but for :func:`here`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.coordination.world import World
from hydroslurm.core.dates import boot_id
from hydroslurm.errors import UsageError


@dataclass(frozen=True)
class Where:
    """What one rank says of itself.

    Attributes:
        host: the same on all ranks that can share memory, and on no others.
        node: the number of its node where its launcher tells one.
    """

    rank: int
    local_rank: int
    local_world_size: int
    host: str
    node: int | None = None


@dataclass(frozen=True)
class Nodes:
    """All ranks by node, and this one's place.

    Attributes:
        members: of each node the ranks, by local rank; the first one speaks for it.
        node: this rank's.
        local_rank: within it.
    """

    members: tuple[tuple[int, ...], ...]
    node: int
    local_rank: int

    @property
    def mine(self) -> tuple[int, ...]:
        return self.members[self.node]


def here(rank: int, environ: Mapping[str, str]) -> Where:
    """What this rank says of itself.

    Args:
        rank: its number in the process group.

    Raises:
        UsageError: the variables of its launcher contradict each other.
    """
    world = World.from_environ(environ)
    number = environ.get("GROUP_RANK") or environ.get("SLURM_NODEID") or ""  # torchrun's is closer
    space = ""
    with contextlib.suppress(OSError):  # memory is handed over through a socket of this network
        space = str(Path("/proc/self/ns/net").readlink())
    return Where(
        rank=rank,
        local_rank=world.local_rank,
        local_world_size=world.local_world_size,
        host=f"{boot_id()} {space}",
        node=int(number) if number.isdecimal() else None,
    )


def group(told: Sequence[Where], rank: int) -> Nodes:
    """All ranks by node, in the order of their first ranks.

    Without numbers of nodes, local ranks 0 to n - 1 of one host are one node where their ranks
    follow each other.

    Raises:
        UsageError: what the ranks say does not fit together; the message names a rank.
    """
    nodes: dict[tuple[str, int], list[Where]] = {}
    for one in told:
        number = one.rank - one.local_rank if one.node is None else one.node
        nodes.setdefault((one.host, number), []).append(one)
    for found in nodes.values():
        found.sort(key=lambda one: one.local_rank)
        local_ranks = [one.local_rank for one in found]
        if local_ranks != list(range(found[0].local_world_size)):
            raise UsageError(
                f"rank {found[0].rank} says that {found[0].local_world_size} ranks are on its "
                f"node, and there are those with LOCAL_RANK {local_ranks}. Start the ranks with "
                "srun, torchrun or hydroslurm agent, or set LOCAL_RANK, LOCAL_WORLD_SIZE and, "
                "where the ranks of a node do not follow each other, GROUP_RANK. The process group "
                "has to have all ranks of each node"
            )
    ordered = sorted(nodes.values(), key=lambda found: found[0].rank)
    members = tuple(tuple(one.rank for one in found) for found in ordered)
    node = next(number for number, ranks in enumerate(members) if rank in ranks)
    return Nodes(members, node, members[node].index(rank))
