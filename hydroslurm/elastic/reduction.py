"""The sum of the gradients over a generation, as a communication hook of DistributedDataParallel.

A rank's gradient is weighted by its samples, so the ranks' shares of a global batch may differ. DDP
runs on a group of one and divides by 1, so the hook returns the gradient of the mean over all
samples, if the loss is the mean over this rank's.

A failing collective does not raise in the middle of a backward. It marks the step, whose remaining
buckets are not sent, and the run drops the step at its end. Nothing has changed by then.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from hydroslurm.elastic.fixed_order import ShardGradients, sum_in_order
from hydroslurm.errors import RanksError

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
