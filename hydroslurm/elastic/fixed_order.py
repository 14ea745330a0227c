"""The sum of gradients in a fixed order: the same bits for every number of ranks.

Floating-point addition is not associative, so an all-reduce over three ranks gives other last bits
than one over two. Here each step is divided into shards whose number never changes. Each shard has
a forward and a backward of its own, on whichever rank, and the shards' gradients are added in the
order of their numbers: ((g0 + g1) + g2) + ... (EasyScale, arXiv:2208.14228, has the idea.)

Each rank adds up one part of the weights for all: an all-to-all brings it the shards' gradients of
that part, an all-gather hands out the sums. With P bytes of gradients, n shards and w ranks a rank
sends (n/w + 1) P (w-1)/w bytes, where a ring all-reduce sends 2 P (w-1)/w: the same at full size,
and more with fewer ranks, because a rank may not add up its own shards before. It keeps the
gradients of all its shards until then, n/w P bytes, and sends nothing during the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.errors import UsageError

PIECE_BYTES = 32 << 20
"""Of one shard's gradients, that are exchanged at once."""


def sum_in_order(
    mine: list[torch.Tensor], count: int, *, like: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Add vectors up in the order of their numbers; all ranks call this.

    Args:
        mine: of this rank r of w: those numbered r, r+w, r+2w and so on.
        count: how many there are on all ranks together.
        like: a vector of their length, type and device.

    Raises:
        RuntimeError: a rank is gone.
    """
    world_size = 1 if group is None else dist.get_world_size(group)
    if group is None or world_size == 1:
        return _added(mine)
    total = torch.empty_like(like)
    step = max(1, PIECE_BYTES // like.element_size())
    for at in range(0, like.numel(), step):
        pieces = [one[at : at + step] for one in mine]
        total[at : at + step] = _exchanged(pieces, count, total[at : at + step], group)
    return total


def _exchanged(
    mine: list[torch.Tensor], count: int, like: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    world_size = dist.get_world_size(group)
    part = -(-like.numel() // world_size)
    sent = like.new_zeros(world_size, len(mine), part)
    for number, one in enumerate(mine):
        for rank, piece in enumerate(torch.split(one, part)):
            sent[rank, number, : piece.numel()] = piece
    shards = [len(range(rank, count, world_size)) for rank in range(world_size)]
    arrived = like.new_empty(count * part)
    dist.all_to_all_single(
        arrived,
        sent.view(-1),
        [many * part for many in shards],
        [len(mine) * part] * world_size,
        group=group,
    )
    by_rank = [one.view(-1, part) for one in torch.split(arrived, [many * part for many in shards])]
    summed = _added([by_rank[number % world_size][number // world_size] for number in range(count)])
    parts = [torch.empty_like(summed) for _ in range(world_size)]
    dist.all_gather(parts, summed, group=group)
    return torch.cat(parts)[: like.numel()]


def _added(vectors: list[torch.Tensor]) -> torch.Tensor:
    total = vectors[0].clone()
    for one in vectors[1:]:
        total.add_(one)
    return total


class ShardGradients:
    """The gradients that a step's shards leave in the weights, taken out one shard after the other.

    What was in the weights before (of the other batches of an accumulated step) is added in the
    end. A weight that no shard has reached keeps what it had.
    """

    def __init__(self, modules: Iterable[DistributedDataParallel]) -> None:
        self._modules = list(modules)
        self._kinds: dict[object, list[torch.nn.Parameter]] = {}
        for one in (one for module in self._modules for one in module.parameters()):
            if one.requires_grad:
                self._kinds.setdefault((one.dtype, one.device), []).append(one)
        self._before = {one: one.grad for kind in self._kinds.values() for one in kind}
        self._taken: list[list[torch.Tensor]] = [[] for _ in self._kinds]
        self._clear()

    @contextlib.contextmanager
    def shard(self, weight: float) -> Iterator[None]:
        """One shard's forward and backward; ``weight``: its part of the samples of the step."""
        with contextlib.ExitStack() as quiet:
            for module in self._modules:
                quiet.enter_context(module.no_sync())
            yield
        for kind, taken in zip(self._kinds.values(), self._taken, strict=True):
            vector = _empty(kind)
            at = 0
            for one in kind:
                if one.grad is not None and one.grad.is_sparse:
                    raise UsageError(
                        "summation: fixed_order cannot add up sparse gradients: use "
                        "Embedding(sparse=False), or leave summation out"
                    )
                piece = vector[at : at + one.numel()].view(one.shape)
                piece.zero_() if one.grad is None else torch.mul(one.grad, weight, out=piece)
                at += one.numel()
            vector[at:] = vector.new_tensor([one.grad is not None for one in kind])
            taken.append(vector)
        self._clear()

    def vectors(self) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """What is to be added up, for each type of weights: this rank's shards, and a vector like
        theirs."""
        for kind, taken in zip(self._kinds.values(), self._taken, strict=True):
            yield taken, taken[0] if taken else _empty(kind)

    def put(self, sums: Iterable[torch.Tensor]) -> None:
        """Make these sums the gradients."""
        for kind, vector in zip(self._kinds.values(), sums, strict=True):
            reached = (vector[-len(kind) :] > 0).tolist()
            at = 0
            for one, is_reached in zip(kind, reached, strict=True):
                before = self._before[one]
                one.grad = before
                if is_reached:
                    summed = vector[at : at + one.numel()].view(one.shape)
                    one.grad = summed if before is None else before + summed
                at += one.numel()

    def _clear(self) -> None:
        for one in self._before:
            one.grad = None


def _empty(kind: list[torch.nn.Parameter]) -> torch.Tensor:
    """Room for the gradients of these weights, and whether each has one."""
    return kind[0].detach().new_empty(sum(one.numel() for one in kind) + len(kind))
