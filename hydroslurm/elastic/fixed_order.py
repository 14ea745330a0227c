"""Sum gradients in a fixed order: the same bits for every number of ranks.

Floating-point addition is not associative, so an all-reduce over three ranks differs in the last
bits from one over two. Here each step has a fixed number of shards. Each shard has its own forward
and backward, on any rank, and the shards' gradients are added in numerical order:
((g0 + g1) + g2) + ... The idea is EasyScale's (arXiv:2208.14228).

Each rank sums one part of the weights for all: an all-to-all brings it the shards' gradients of
that part, an all-gather distributes the sums. With P bytes of gradients, n shards and w ranks, a
rank sends (n/w + 1) P (w-1)/w bytes, while a ring all-reduce sends 2 P (w-1)/w: the same at full
size, more with fewer ranks, since a rank may not add its own shards first. Until then it keeps
the gradients of all its shards, n/w P bytes, and sends nothing during the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.errors import UsageError

PIECE_BYTES = 32 << 20
"""How much of one shard's gradients is exchanged at once."""


def sum_in_order(
    own: list[torch.Tensor], count: int, *, like: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Add vectors in numerical order; all ranks call this.

    Args:
        own: vectors of this rank r of w: those numbered r, r+w, r+2w and so on.
        count: how many all ranks have together.
        like: a vector of the same length, type and device.

    Raises:
        RuntimeError: a rank is gone.
    """
    world_size = 1 if group is None else dist.get_world_size(group)
    if group is None or world_size == 1:
        return _added(own)
    total = torch.empty_like(like)
    step = max(1, PIECE_BYTES // like.element_size())
    for at in range(0, like.numel(), step):
        pieces = [vector[at : at + step] for vector in own]
        total[at : at + step] = _exchanged(pieces, count, total[at : at + step], group)
    return total


def _exchanged(
    own: list[torch.Tensor], count: int, like: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    world_size = dist.get_world_size(group)
    part = -(-like.numel() // world_size)
    sent = like.new_zeros(world_size, len(own), part)
    for number, vector in enumerate(own):
        for rank, piece in enumerate(torch.split(vector, part)):
            sent[rank, number, : piece.numel()] = piece
    shards = [len(range(rank, count, world_size)) for rank in range(world_size)]
    arrived = like.new_empty(count * part)
    dist.all_to_all_single(
        arrived,
        sent.view(-1),
        [many * part for many in shards],
        [len(own) * part] * world_size,
        group=group,
    )
    by_rank = [t.view(-1, part) for t in torch.split(arrived, [n * part for n in shards])]
    summed = _added([by_rank[number % world_size][number // world_size] for number in range(count)])
    parts = [torch.empty_like(summed) for _ in range(world_size)]
    dist.all_gather(parts, summed, group=group)
    return torch.cat(parts)[: like.numel()]


def _added(vectors: list[torch.Tensor]) -> torch.Tensor:
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total.add_(vector)
    return total


class ShardGradients:
    """The gradients that a step's shards leave in the weights, collected shard by shard.

    Gradients that were there before (from other batches of an accumulated step) are added at the
    end. A weight that no shard has reached keeps what it had.
    """

    def __init__(self, modules: Iterable[DistributedDataParallel]) -> None:
        self._modules = list(modules)
        self._kinds: dict[object, list[torch.nn.Parameter]] = {}
        for weight in (weight for module in self._modules for weight in module.parameters()):
            if weight.requires_grad:
                self._kinds.setdefault((weight.dtype, weight.device), []).append(weight)
        self._before = {weight: weight.grad for kind in self._kinds.values() for weight in kind}
        self._taken: list[list[torch.Tensor]] = [[] for _ in self._kinds]
        self._clear()

    @contextlib.contextmanager
    def shard(self, weight: float) -> Iterator[None]:
        """Run one shard's forward and backward; ``weight``: its share of the step's samples."""
        with contextlib.ExitStack() as quiet:
            for module in self._modules:
                quiet.enter_context(module.no_sync())
            yield
        for kind, taken in zip(self._kinds.values(), self._taken, strict=True):
            vector = _empty(kind)
            at = 0
            for parameter in kind:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    raise UsageError(
                        "summation: fixed_order cannot add up sparse gradients: use "
                        "Embedding(sparse=False), or leave summation out"
                    )
                piece = vector[at : at + parameter.numel()].view(parameter.shape)
                piece.zero_() if parameter.grad is None else torch.mul(
                    parameter.grad, weight, out=piece
                )
                at += parameter.numel()
            vector[at:] = vector.new_tensor([parameter.grad is not None for parameter in kind])
            taken.append(vector)
        self._clear()

    def vectors(self) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """Yield, for each type of weights, this rank's vectors to add, and an example of their
        shape."""
        for kind, taken in zip(self._kinds.values(), self._taken, strict=True):
            yield taken, taken[0] if taken else _empty(kind)

    def put(self, sums: Iterable[torch.Tensor]) -> None:
        """Make these sums the gradients."""
        for kind, vector in zip(self._kinds.values(), sums, strict=True):
            reached = (vector[-len(kind) :] > 0).tolist()
            at = 0
            for parameter, is_reached in zip(kind, reached, strict=True):
                before = self._before[parameter]
                parameter.grad = before
                if is_reached:
                    summed = vector[at : at + parameter.numel()].view(parameter.shape)
                    parameter.grad = summed if before is None else before + summed
                at += parameter.numel()

    def _clear(self) -> None:
        for weight in self._before:
            weight.grad = None


def _empty(kind: list[torch.nn.Parameter]) -> torch.Tensor:
    """Allocate a vector for these weights' gradients, and a flag for each: has it one?"""
    return kind[0].detach().new_empty(sum(weight.numel() for weight in kind) + len(kind))
