"""Default process groups that stay from one generation to the next, and are connected anew.

Whoever keeps ``dist.group.WORLD`` keeps a group that works. What torch.distributed notes beside the
default group (its ranks, the groups made of it, how many have been made) is brought to where it is
behind ``init_process_group``: ranks that have just come have it so, and a name or a rank that
differs would have them wait for each other.
"""

from __future__ import annotations

import abc
import inspect
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hydroslurm.elastic.directives import Form
from hydroslurm.elastic.group import MEETING_S, TIMEOUT_S, GenerationGroup
from hydroslurm.elastic.member import Member
from hydroslurm.elastic.sharded import Shards

_torch: Any = dist
"""For names that only some releases of torch have."""


class KeptGroup(GenerationGroup, abc.ABC):
    """One default group for all generations."""

    def __init__(self, member: Member, *, backend: str, shards: Shards | None = None) -> None:
        super().__init__(member, backend=backend, shards=shards)
        self._kept: dist.ProcessGroup | None = None

    def destroy(self) -> None:
        super().destroy()
        self._kept = None

    def _meet(self, form: Form) -> None:
        if self._kept is None or self._kept is not dist.group.WORLD:
            self.destroy()  # the script's own, mostly
            self._begin(form)
            self._kept = dist.group.WORLD
        else:
            self._end_groups_beside(self._kept)
            self._connect(form)
        assert self._kept is not None
        self._note_ranks(self._kept, form.world_size)

    def _end_groups_beside(self, kept: dist.ProcessGroup) -> None:
        """Groups of the script's own hold ranks that may be gone, by numbers that mean others
        now."""
        for group in list(distributed_c10d._world.pg_map):
            of_node = self._shards is not None and group in self._shards.node_groups
            if group is not kept and not of_node:
                dist.destroy_process_group(group)

    def _note_ranks(self, kept: dist.ProcessGroup, world_size: int) -> None:
        world = distributed_c10d._world
        world.pg_group_ranks[kept] = {rank: rank for rank in range(world_size)}
        world.group_count = 1 if self._shards is None else self._shards.node_groups.count + 1

    @abc.abstractmethod
    def _begin(self, form: Form) -> None:
        """Make the default group, connected."""

    @abc.abstractmethod
    def _connect(self, form: Form) -> None:
        """Connect it with the ranks of this generation."""


class ReconfiguredGroup(KeptGroup):
    """By torch's own reconfigurable process groups.

    torch calls them experimental, and their names begin with an underscore; nothing else of this
    package uses them. What they do, from torch 2.14's ProcessGroupGlooReconfigure.cpp and
    nccl2/ProcessGroupNCCLReconfigure.cpp: the position of a handle in the list is its rank; all
    ranks pass the same list and a number that was never used; they exchange addresses by the store
    that the group was made with, below that number; who waits in an old collective is not woken up.
    """

    engine = "reconfigure"

    def _begin(self, form: Form) -> None:
        # The rank is a part of the handle, and all that tells ranks apart which are both new.
        _torch.init_process_group(
            self._backend,
            store=self._store,
            rank=form.rank,
            world_size=form.world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
            enable_reconfigure=True,
        )
        self._connect(form)

    def _connect(self, form: Form) -> None:
        handles = self._exchanged(_torch._get_reconfigure_handle(), form)
        timeout = timedelta(seconds=MEETING_S)
        _torch._reconfigure(form.generation, handles, timeout=timeout).wait()

    def _exchanged(self, handle: str, form: Form) -> list[str]:
        """The handles of all ranks, by their ranks."""
        self._store.set(f"handle/{form.rank}", handle)
        keys = [f"{form.generation}/handle/{rank}" for rank in range(form.world_size)]
        return [one.decode() for one in self._member.get_values(keys)]


def why_not_reconfigure(backend: str) -> str:
    """Why torch's groups cannot be reconfigured here; "" if they can."""
    found = inspect.signature(dist.init_process_group).parameters
    calls = ("_get_reconfigure_handle", "_reconfigure")
    if "enable_reconfigure" not in found or not all(hasattr(dist, one) for one in calls):
        return f"torch {torch.__version__} has no reconfigurable process groups; 2.14 has"
    if backend not in ("gloo", "nccl2"):
        return (
            f"torch reconfigures groups of gloo or of nccl2, and this one is {backend}: "
            'init_process_group("nccl2")'
        )
    return ""
