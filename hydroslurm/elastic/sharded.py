"""A model that each member shards over its own ranks by FSDP2, and that all members have (HSDP).

The shards stay where they are. Rank i of each member has the same shard as rank i of every other,
so that these ranks sum its gradient, and a newcomer's rank i gets its state from there. torch has a
place for the sum (``FSDPModule.set_all_reduce_hook``, which is called behind the reduce-scatter:
_fsdp_collectives.py, ``foreach_reduce``); its own HSDP, a mesh of two dimensions, would keep the
group of the members for ever.

The ranks of a member wait for each other within a step, where nobody can have them fail. So none of
them may hold while another goes on, and none may keep a step that another drops: between two steps
they agree on both (:meth:`Shards.agree`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils import _pytree

from hydroslurm.checkpoint.tree import is_dtensor
from hydroslurm.elastic.roster import Form
from hydroslurm.elastic.transfer import hand_over
from hydroslurm.errors import RanksError, UsageError

_SHARD = "hydroslurm.shard"


class NodeGroups:
    """The process groups that a script has made among the ranks of its own node, kept while the
    default group becomes that of a generation, and the next one's: all that there are now.

    torch ends all groups with the default one (distributed_c10d.py, ``destroy_process_group``), and
    a group holds the ranks of its processes by their numbers in the default one. FSDP2's mesh holds
    its group by name and asks for its ranks each time (``DeviceMesh.get_group``), so that it works
    on as long as both are right. What is used of torch here begins with an underscore: seen in 2.7
    to 2.14.
    """

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


class Shards:
    """This rank's part of such a model.

    Attributes:
        node_groups: those of the script, which stay.
    """

    def __init__(self, modules: list[Any], *, local_size: int) -> None:
        """
        Args:
            modules: all of ``fully_shard``.
            local_size: ranks of this member.

        Raises:
            UsageError: they are not sharded over the ranks of this member, all of them and only
                these.
        """
        self._modules = modules
        self._mesh = _mesh_of(modules, local_size)
        self._size = local_size
        # its own: a rank that agrees and one that is in a step must not be taken for each other's
        self._together = dist.new_group(backend="gloo") if local_size > 1 else None
        self.node_groups = NodeGroups()

    def sum_by(self, sum_shard: Callable[[torch.Tensor], None]) -> None:
        """Have this called for the gradient of each shard, which it changes in place."""
        for module in self._modules:
            module.set_all_reduce_hook(sum_shard)

    def replicas(self, form: Form) -> dist.ProcessGroup | None:
        """Make the group of the ranks that have the same shard; None if no other has. All ranks of
        the generation call this."""
        if form.world_size == self._size:
            return None
        groups: list[dist.ProcessGroup] = [
            dist.new_group(list(range(place, form.world_size, self._size)))
            for place in range(self._size)
        ]
        return groups[form.rank % self._size]

    def agree(self, *flags: bool, limit_s: float | None = None) -> tuple[bool, ...]:
        """Whether any rank of this member says so, for each flag.

        Raises:
            RuntimeError: a rank of this member is gone, or does not come within ``limit_s``.
        """
        if self._together is None:
            return flags
        told = torch.tensor(flags, dtype=torch.uint8)
        work = dist.all_reduce(told, dist.ReduceOp.MAX, group=self._together, async_op=True)
        if limit_s is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=limit_s))
        return tuple(bool(one) for one in told)

    def hand_over(self, state: Any, form: Form) -> Any:
        """As :func:`hydroslurm.elastic.transfer.hand_over`, of each shard by itself.

        Args:
            state: of this rank, asked for where it is to be sent.

        Raises:
            RanksError: what arrived is not what was sent, or a member's ranks have trained
                different steps.
        """
        place = form.rank % self._size
        source = form.source - form.source % self._size + place
        beside = range(source - place, source - place + self._size)
        if not form.fresh and (torn := [rank for rank in form.needs if rank in beside]):
            raise RanksError(
                f"ranks {', '.join(map(str, torn))} have not trained the step of rank "
                f"{form.source}, which has other shards of the same replica"
            )
        got = None
        for to in form.needs:
            if to % self._size == place and to != source and form.rank in (source, to):
                mine = _pack(state()) if form.rank == source else None
                got = hand_over(mine, source=source, needs=[to], rank=form.rank)
        return None if got is None else self._unpack(got)

    def _unpack(self, state: Any) -> Any:
        # imported here: it takes 0.2 s, and a training without DTensors never needs it
        from torch.distributed.tensor import DTensor, Shard

        def whole(one: Any) -> Any:
            if not _is_packed(one):
                return one
            local, shape, stride, dim = one[_SHARD]
            return DTensor.from_local(
                local.to(self._mesh.device_type),
                self._mesh,
                [Shard(dim)],
                run_check=False,
                shape=torch.Size(shape),
                stride=tuple(stride),
            )

        return _pytree.tree_map(whole, state, is_leaf=_is_packed)


def sharded_modules(things: Iterable[Any]) -> list[Any]:
    """All modules in these objects that ``fully_shard`` was called for."""
    return [
        module
        for thing in things
        for module in (thing.modules() if isinstance(thing, nn.Module) else ())
        if "FSDPModule" in {kind.__name__ for kind in type(module).__mro__}
    ]


def _mesh_of(modules: list[Any], local_size: int) -> Any:
    parameters = [one for module in modules for one in module.parameters()]
    meshes = {one.device_mesh for one in parameters if is_dtensor(one)}
    (mesh, *others) = meshes or {None}
    if mesh is None or others or mesh.ndim != 1 or mesh.size() != local_size:
        seen = ", ".join(sorted(str(one) for one in meshes)) or "none"
        raise UsageError(
            f"a model that each member shards needs one mesh of one dimension, over the "
            f"{local_size} ranks of the member: init_device_mesh(kind, (dist.get_world_size(),)), "
            f"and this one has: {seen}"
        )
    whole = [
        name for one in modules for name, each in one.named_parameters() if not is_dtensor(each)
    ]
    if whole:
        raise UsageError(
            f"{whole[0]} belongs to no shard, and nothing would sum its gradient over the members: "
            "call fully_shard for the whole model, last, and ignore no parameter"
        )
    if not all(hasattr(one, "set_all_reduce_hook") for one in modules):
        raise UsageError(
            f"torch {torch.__version__} has no FSDPModule.set_all_reduce_hook, which members that "
            "shard their model need: torch 2.7 has"
        )
    return mesh


def _pack(state: Any) -> Any:
    def local(one: Any) -> Any:
        if not is_dtensor(one):
            return one
        (placement,) = one.placements
        return {_SHARD: [one.to_local(), list(one.shape), list(one.stride()), placement.dim]}

    return _pytree.tree_map(local, state)


def _is_packed(one: Any) -> bool:
    return isinstance(one, dict) and _SHARD in one
