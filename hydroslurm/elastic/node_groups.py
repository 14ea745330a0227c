"""The process groups that a script has made among the ranks of its own node, kept while the default
group becomes that of a generation, and the next one's.

torch ends all groups with the default one (distributed_c10d.py, ``destroy_process_group``), and a
group holds the ranks of its processes by their numbers in the default one. FSDP2's mesh holds its
group by name and asks for its ranks each time (``DeviceMesh.get_group``), so that it works on as
long as both are right. What is used of torch here begins with an underscore: seen in 2.7 to 2.14.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


class NodeGroups:
    """All groups that there are now, the default one among them: nobody but this node's ranks is in
    them."""

    def __init__(self) -> None:
        world: Any = distributed_c10d._world
        self._default = dist.group.WORLD
        self._ranks = {group: dict(ranks) for group, ranks in world.pg_group_ranks.items()}
        self._count = int(world.group_count)

    def end_others(self) -> None:
        """Destroy the default group of a generation and what was made of it; these stay."""
        distributed_c10d._update_default_pg(None)
        for group in list(distributed_c10d._world.pg_map):
            if group not in self._ranks:
                with contextlib.suppress(RuntimeError, ValueError):
                    dist.destroy_process_group(group)
        distributed_c10d._world.group_count = self._count

    def renumber(self, first: int) -> None:
        """The ranks of this node have the numbers from ``first`` on in the default group."""
        for group, ranks in self._ranks.items():
            numbered = {rank + first: place for rank, place in ranks.items()}
            distributed_c10d._world.pg_group_ranks[group] = numbered

    def give_back(self) -> None:
        """The script's own default group is the default group again."""
        self.end_others()
        self.renumber(0)
        distributed_c10d._update_default_pg(self._default)
