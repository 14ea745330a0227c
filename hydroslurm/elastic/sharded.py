"""A model that each member shards over its own ranks by FSDP2, replicated on all members (HSDP).

Shards stay in place. Rank i has the same shard on each member, so these ranks sum its gradient, and
a newcomer's rank i gets its state from one of them. torch calls a hook for the sum after the
reduce-scatter (``FSDPModule.set_all_reduce_hook``: _fsdp_collectives.py, ``foreach_reduce``). Its
own HSDP, a two-dimensional mesh, would keep the members' group for ever.

Within a step a member's ranks wait for each other, and nothing can make that wait fail. So none may
hold while another goes on, or keep a step that another drops: between two steps they agree on both
(:meth:`Shards.agree`).
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
    """All process groups that a script has made among its node's ranks. They stay while the
    default group becomes that of one generation, then of the next.

    torch ends all groups with the default one (distributed_c10d.py, ``destroy_process_group``), and
    a group stores its ranks by their numbers in the default one. FSDP2's mesh holds its group by
    name and asks for its ranks each time (``DeviceMesh.get_group``), so it keeps working while both
    are right. This uses private names of torch: seen in 2.7 to 2.14.
    """

    def __init__(self) -> None:
        world: Any = distributed_c10d._world
        self._default = dist.group.WORLD
        self._ranks = {group: dict(ranks) for group, ranks in world.pg_group_ranks.items()}
        self._count = int(world.group_count)

    def end_others(self) -> None:
        """Destroy a generation's default group and the groups made from it; keep these."""
        distributed_c10d._update_default_pg(None)
        for group in list(distributed_c10d._world.pg_map):
            if group not in self._ranks:
                with contextlib.suppress(RuntimeError, ValueError):
                    dist.destroy_process_group(group)
        distributed_c10d._world.group_count = self._count

    def renumber(self, first: int) -> None:
        """Number this node's ranks from ``first`` on in the default group."""
        for group, ranks in self._ranks.items():
            numbered = {rank + first: place for rank, place in ranks.items()}
            distributed_c10d._world.pg_group_ranks[group] = numbered

    def give_back(self) -> None:
        """Make the script's own default group the default again."""
        self.end_others()
        self.renumber(0)
        distributed_c10d._update_default_pg(self._default)


class Shards:
    """This rank's part of a model that each member shards.

    Attributes:
        node_groups: the script's groups, which stay.
    """

    def __init__(self, modules: list[Any], *, local_size: int) -> None:
        """
        Args:
            modules: all that ``fully_shard`` was called for.
            local_size: number of this member's ranks.

            Raises:
            UsageError: they are not sharded over exactly this member's ranks.
        """
        self._modules = modules
        self._mesh = _mesh_of(modules, local_size)
        self._size = local_size
        # a group of its own: do not mix an agreement with another rank's step
        self._together = dist.new_group(backend="gloo") if local_size > 1 else None
        self.node_groups = NodeGroups()

    def sum_by(self, sum_shard: Callable[[torch.Tensor], None]) -> None:
        """Call this with the gradient of each shard, to change it in place."""
        for module in self._modules:
            module.set_all_reduce_hook(sum_shard)

    def replicas(self, form: Form) -> dist.ProcessGroup | None:
        """Make the group of the ranks with the same shard; None if there is no other. All ranks of
        the generation call this."""
        if form.world_size == self._size:
            return None
        groups: list[dist.ProcessGroup] = [
            dist.new_group(list(range(place, form.world_size, self._size)))
            for place in range(self._size)
        ]
        return groups[form.rank % self._size]

    def agree(self, *flags: bool, limit_s: float | None = None) -> tuple[bool, ...]:
        """Return, for each flag, whether it is set on any rank of this member.

        Raises:
            RuntimeError: a rank of this member is gone, or does not come within ``limit_s``.
        """
        if self._together is None:
            return flags
        votes = torch.tensor(flags, dtype=torch.uint8)
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._together, async_op=True)
        if limit_s is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=limit_s))
        return tuple(bool(vote) for vote in votes)

    def hand_over(self, state: Any, form: Form) -> Any:
        """Transfer each shard separately, as :func:`hydroslurm.elastic.transfer.hand_over`.

        Args:
            state: returns this rank's state; called only to send it.

        Raises:
            RanksError: received bytes differ from those sent, or a member's ranks have trained
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
                packed = _pack(state()) if form.rank == source else None
                got = hand_over(packed, source=source, needs=[to], rank=form.rank)
        return None if got is None else self._unpack(got)

    def _unpack(self, state: Any) -> Any:
        # import here: it takes 0.2 s, and a training without DTensors never needs it
        from torch.distributed.tensor import DTensor, Shard

        def whole(value: Any) -> Any:
            if not _is_packed(value):
                return value
            local, shape, stride, dim = value[_SHARD]
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
    """Return all modules in these objects that ``fully_shard`` was called for."""
    return [
        module
        for thing in things
        for module in (thing.modules() if isinstance(thing, nn.Module) else ())
        if "FSDPModule" in {kind.__name__ for kind in type(module).__mro__}
    ]


def _mesh_of(modules: list[Any], local_size: int) -> Any:
    parameters = [p for module in modules for p in module.parameters()]
    meshes = {p.device_mesh for p in parameters if is_dtensor(p)}
    (mesh, *others) = meshes or {None}
    if mesh is None or others or mesh.ndim != 1 or mesh.size() != local_size:
        seen = ", ".join(sorted(str(mesh) for mesh in meshes)) or "none"
        raise UsageError(
            f"a model that each member shards needs one mesh of one dimension, over the "
            f"{local_size} ranks of the member: init_device_mesh(kind, (dist.get_world_size(),)), "
            f"and this one has: {seen}"
        )
    whole = [
        name for module in modules for name, p in module.named_parameters() if not is_dtensor(p)
    ]
    if whole:
        raise UsageError(
            f"{whole[0]} belongs to no shard, and nothing would sum its gradient over the members: "
            "call fully_shard for the whole model, last, and ignore no parameter"
        )
    if not all(hasattr(module, "set_all_reduce_hook") for module in modules):
        raise UsageError(
            f"torch {torch.__version__} has no FSDPModule.set_all_reduce_hook, which members that "
            "shard their model need: torch 2.7 has"
        )
    return mesh


def _pack(state: Any) -> Any:
    def local(value: Any) -> Any:
        if not is_dtensor(value):
            return value
        (placement,) = value.placements
        return {_SHARD: [value.to_local(), list(value.shape), list(value.stride()), placement.dim]}

    return _pytree.tree_map(local, state)


def _is_packed(value: Any) -> bool:
    return isinstance(value, dict) and _SHARD in value
