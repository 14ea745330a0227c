"""The gradients of one rank: their sum over a generation, also in a fixed order, and whether some
are unused between two steps.

The sum is a communication hook of DistributedDataParallel.

A rank's gradient is weighted by its samples, so the ranks' shares of a global batch may differ. DDP
runs on a group of one and divides by 1, so the hook returns the gradient of the mean over all
samples, if the loss is the mean over this rank's.

A failing collective does not raise in the middle of a backward. It marks the step, whose remaining
buckets are not sent, and the run drops the step at its end. Nothing has changed by then.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.errors import RanksError, UsageError

_FAILURES = (RuntimeError, ValueError)
"""What torch raises when a collective fails."""


class GradientSum:
    """The gradient sum of one rank, for all its DDP modules; the hook is :func:`sum_bucket`.

    Attributes:
        weight: this rank's share of the current step's samples, from 0 to 1; all ranks' shares
            add up to 1.
        averages: the ranks train independently. Each step sums one number, so that all notice
            in the same step when a rank is gone.
        begun: collectives of steps so far, failed ones included.
        is_sending: this step's gradients have been sent, so this rank is not the late one. The
            caller that counts the steps resets it.
    """

    def __init__(
        self,
        group: Callable[[], dist.ProcessGroup | None],
        *,
        may_send: Callable[[], bool],
        on_error: Callable[[], None],
    ) -> None:
        """
        Args:
            group: that of the generation; None while this rank is alone.
            may_send: False once the generation is broken.
            on_error: called in any thread when a collective has failed.
        """
        self.weight = 1.0
        self.averages = False
        self.is_sending = False
        self.begun = 0
        self._group = group
        self._may_send = may_send
        self._on_error = on_error
        self._names: dict[int, int] = {}
        self._compared: dict[tuple[int, int], bytes] = {}

    def begin_generation(self, parameters: list[torch.nn.Parameter]) -> None:
        """Note that the buckets were rebuilt for these parameters, ordered alike on all ranks."""
        self._names = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._compared.clear()

    def sum(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Sum one bucket over the generation."""
        self.begun += 1
        buffer = bucket.buffer()
        group = self._group()
        if group is None or not self._may_send():
            if not self._may_send():
                self._on_error()
            return _done(buffer)
        self.is_sending = True
        if self.averages:
            if self.weight == 0.0:
                buffer.zero_()
            if bucket.is_last():
                with self._marked():
                    dist.all_reduce(buffer.new_zeros(1), group=group)
            return _done(buffer)
        try:
            self._compare(bucket, group)
            if self.weight != 1.0:
                buffer.mul_(self.weight)
            future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        except _FAILURES:
            self._on_error()
            return _done(buffer)

        def summed(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            try:
                return future.value()[0]
            except _FAILURES:
                self._on_error()
                return buffer

        return cast("torch.futures.Future[torch.Tensor]", future.then(summed))

    def average_shard(self, gradient: torch.Tensor, replicas: dist.ProcessGroup | None) -> None:
        """Average the gradient of one shard, already the mean over this member's ranks, over all
        members; in place.

        Args:
            replicas: ranks with the same shard; None if there is no other.
        """
        if not self._may_send():
            self._on_error()
            return
        self.is_sending = True
        if replicas is not None:
            with self._marked():
                dist.all_reduce(gradient, group=replicas)
                gradient.div_(replicas.size())

    def sum_shards(self, gradients: ShardGradients, count: int) -> None:
        """Sum the gradients of a step's ``count`` shards over all ranks in their order."""
        self.begun += 1
        if not self._may_send():
            self._on_error()
            return
        group = self._group()
        self.is_sending = True
        try:
            sums = [
                sum_in_order(own, count, like=like, group=group)
                for own, like in gradients.vectors()
            ]
        except _FAILURES:
            self._on_error()
        else:
            gradients.put(sums)

    def share_buffers(self, module: torch.nn.Module) -> None:
        """Copy rank 0's buffers to all ranks, as DDP does before each training forward."""
        self.begun += 1
        group = self._group()
        buffers = [buffer for buffer in module.buffers() if buffer.numel()]
        if group is None or not buffers or not self._may_send():
            return
        with self._marked(), torch.no_grad():
            for kind in dict.fromkeys((buffer.dtype, buffer.device) for buffer in buffers):
                alike = [buffer for buffer in buffers if (buffer.dtype, buffer.device) == kind]
                flat = torch.cat([buffer.reshape(-1) for buffer in alike])
                dist.broadcast(flat, group=group, group_src=0)
                parts = torch.split(flat, [buffer.numel() for buffer in alike])
                for buffer, part in zip(alike, parts, strict=True):
                    buffer.copy_(part.view_as(buffer))

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        """Run collectives of a step; if one fails, the step does not count."""
        try:
            yield
        except _FAILURES:  # torch's error only says that a peer is gone; the ledger says why
            self._on_error()

    def _compare(self, bucket: GradBucket, group: dist.ProcessGroup) -> None:
        """Check, the first time a bucket has this composition, that all ranks have the same weights
        in it in the same order. Summing gradients of different weights would raise no error.

        Raises:
            RanksError: they differ.
        """
        parameters = bucket.parameters()
        place = (id(parameters[0]), bucket.index())
        key = b",".join(str(self._names.get(id(p), -1)).encode() for p in parameters)
        if self._compared.get(place) == key:
            return
        self._compared[place] = key
        number = int.from_bytes(hashlib.sha256(key).digest()[:7], "big")
        both = torch.tensor([number, -number], dtype=torch.int64, device=bucket.buffer().device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        if both.tolist() != [number, -number]:
            raise RanksError(
                "the ranks hold different weights in one bucket of DistributedDataParallel: their "
                "models, or the order in which the loss reaches their weights, differ. Build the "
                "same model on all members, from the same code"
            )


def sum_bucket(state: GradientSum, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hook to register: ``model.register_comm_hook(gradient_sum, sum_bucket)``."""
    return state.sum(bucket)


# torch compares the annotations themselves and rejects strings
sum_bucket.__annotations__ = {
    "bucket": GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}


def _done(tensor: torch.Tensor) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensor)
    return future


# --- a fixed order

PIECE_BYTES = 32 << 20
"""How much of one shard's gradients is exchanged at once."""


def sum_in_order(
    own: list[torch.Tensor], count: int, *, like: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Add vectors in numerical order: the same bits for every number of ranks. All ranks call this.

    Floating-point addition is not associative, so an all-reduce over three ranks differs in the
    last bits from one over two. Here each step has a fixed number of shards. Each shard has its
    own forward and backward, on any rank, and the shards' gradients are added in numerical
    order: ((g0 + g1) + g2) + ... The idea is EasyScale's (arXiv:2208.14228).

    Each rank sums one part of the weights for all: an all-to-all brings it the shards'
    gradients of that part, an all-gather distributes the sums. With P bytes of gradients, n
    shards and w ranks, a rank sends (n/w + 1) P (w-1)/w bytes, while a ring all-reduce sends 2
    P (w-1)/w: the same at full size, more with fewer ranks, since a rank may not add its own
    shards first. Until then it keeps the gradients of all its shards, n/w P bytes, and sends
    nothing during the backward.

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


# --- accumulation: no copy of the state holds partial gradients, so members join and leave only
# after the optimizer step that uses them

_MOST_CHECKED = 64
"""How many weights are checked."""


class Accumulation:
    """One rank's gradients between two steps of its optimizers; the same on all ranks."""

    def __init__(self) -> None:
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def used(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note that an optimizer has stepped."""
        grads = ((id(weight), weight.grad) for weight in _some(parameters))
        self._used = {
            key: (weakref.ref(grad), grad._version) for key, grad in grads if grad is not None
        }

    def is_under_way(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether some gradients have not been used by an optimizer. Waits for the device if some
        changed since the last step."""
        return any(
            p.grad is not None and not self._is_used(id(p), p.grad) and bool(p.grad.any())
            for p in _some(parameters)
        )

    def _is_used(self, key: int, grad: torch.Tensor) -> bool:
        # by reference: a new gradient may reuse the address of the last
        reference, version = self._used.get(key, (None, 0))
        return reference is not None and reference() is grad and grad._version == version


def _some(parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return parameters[:: 1 + len(parameters) // _MOST_CHECKED]
