"""The sum of the gradients over a generation, as a communication hook of DistributedDataParallel.

A rank's gradient counts with the weight of its samples: the ranks' shares of one global batch need
not be equal. DDP sits on a group of one and divides by 1, so what the hook gives is the gradient of
the mean over all samples, if the loss is the mean over this rank's.

A collective that fails does not raise in the middle of a backward. The step is marked, its other
buckets are not sent, and the run drops the step at its end: nothing was changed by then.
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
    """One per rank, for all its DDP modules; DDP's hook is :func:`sum_bucket`.

    Attributes:
        weight: this rank's part of the samples of the step that is under way, from 0 to 1; the
            parts of all ranks add up to 1.
        averages: the ranks train apart: of each step one number is summed, by which they notice
            who is gone at the same step.
        begun: collectives of steps so far, those that failed included.
        is_sending: gradients of the step have been sent, so that whoever is late is another one.
            Whoever counts the steps sets it back.
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
            group: of the generation; None while this rank is alone.
            may_send: False once the generation is broken.
            on_error: a collective has failed; in any thread.
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
        """The buckets were built anew, for these parameters, in the same order on all ranks."""
        self._names = {id(one): number for number, one in enumerate(parameters)}
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
        """Make the gradient of one shard, the mean over this member's ranks, that over all members;
        in place.

        Args:
            replicas: the ranks that have this shard; None if no other has.
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
        """Sum the gradients of a step's shards in their order, ``count`` of them on all ranks."""
        self.begun += 1
        if not self._may_send():
            self._on_error()
            return
        group = self._group()
        self.is_sending = True
        try:
            sums = [
                sum_in_order(mine, count, like=like, group=group)
                for mine, like in gradients.vectors()
            ]
        except _FAILURES:
            self._on_error()
        else:
            gradients.put(sums)

    def share_buffers(self, module: torch.nn.Module) -> None:
        """Give all ranks the buffers of rank 0, as DDP does before each forward of a training."""
        self.begun += 1
        group = self._group()
        buffers = [one for one in module.buffers() if one.numel()]
        if group is None or not buffers or not self._may_send():
            return
        with self._marked(), torch.no_grad():
            for kind in dict.fromkeys((one.dtype, one.device) for one in buffers):
                alike = [one for one in buffers if (one.dtype, one.device) == kind]
                flat = torch.cat([one.reshape(-1) for one in alike])
                dist.broadcast(flat, group=group, group_src=0)
                parts = torch.split(flat, [one.numel() for one in alike])
                for one, part in zip(alike, parts, strict=True):
                    one.copy_(part.view_as(one))

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        """Collectives of a step, which counts for nothing if one of them fails."""
        try:
            yield
        except _FAILURES:  # of a peer that is gone it says only that; the ledger says what happened
            self._on_error()

    def _compare(self, bucket: GradBucket, group: dist.ProcessGroup) -> None:
        """Whether all ranks have the same weights in this bucket, in the same order, the first time
        that it is filled so: ranks that add up the gradients of different weights would not fail.

        Raises:
            RanksError: they have not.
        """
        parameters = bucket.parameters()
        place = (id(parameters[0]), bucket.index())
        key = b",".join(str(self._names.get(id(one), -1)).encode() for one in parameters)
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
    """The hook to register: ``model.register_comm_hook(gradient_sum, sum_bucket)``."""
    return state.sum(bucket)


# torch compares the annotations themselves, and refuses their names
sum_bucket.__annotations__ = {
    "bucket": GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}


def _done(tensor: torch.Tensor) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensor)
    return future
