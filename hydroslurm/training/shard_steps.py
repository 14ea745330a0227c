"""The steps of an elastic run with ``summation: fixed_order``: shard by shard, in the script's
loop over ``run.shards(batch)``. See :mod:`hydroslurm.elastic.fixed_order`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hydroslurm.checkpoint import rng
from hydroslurm.data.global_batches import StepShards, shard_key
from hydroslurm.elastic.engine import InPlaceEngine
from hydroslurm.elastic.fixed_order import ShardGradients
from hydroslurm.errors import UsageError

KeptOf = Callable[[torch.nn.Module, str], Any]


class ShardSteps:
    """Of one rank."""

    def __init__(self, engine: InPlaceEngine) -> None:
        engine.shares_buffers = False  # ranks have a forward for each of their shards
        self._engine = engine
        self._unsummed: object = None
        self._are_buffers_checked = False

    def begin_generation(self) -> None:
        """The ranks have met."""
        self._are_buffers_checked = False

    def hand_out(self, batch: object) -> None:
        """The script gets this batch next."""
        self.require_summed("the next batch was fetched")
        self._unsummed = batch

    def require_summed(self, what: str) -> None:
        """
        Raises:
            UsageError: the script has left shards of its step out, and now ``what`` happened.
        """
        if self._unsummed is not None:
            raise UsageError(
                f"{what} before all shards of its step were trained. With `summation: fixed_order` "
                "write `for x, y in run.shards(batch): loss_of(model(x), y).backward()`, to its "
                "end, and the optimizer's step behind it"
            )

    def shards(self, batch: object, kept_of: KeptOf) -> Iterator[Any]:
        """Yield this rank's shards, each to have its forward and backward; then sum.

        Args:
            kept_of: what a module's buffer held before the step.

        Raises:
            UsageError: that is no batch of the run; the forward has changed a buffer.
        """
        if not isinstance(batch, StepShards):
            raise UsageError(
                f"run.shards({type(batch).__name__}): wanted what run.batches() has yielded"
            )
        gradients = ShardGradients(self._engine.modules)
        for one in batch.shards:
            key = shard_key("step", batch.epoch, batch.consumed, one.number, batch.passes)
            with gradients.shard(one.samples / batch.samples), rng.seeded(key):
                yield one.batch
        if not self._are_buffers_checked:
            self._require_same(kept_of)
            self._are_buffers_checked = True
        batch.passes += 1
        self._engine.sum.sum_shards(gradients, batch.count)
        self._unsummed = None

    def _require_same(self, kept_of: KeptOf) -> None:
        buffers = [
            (prefix, module, name, buffer)
            for each in self._engine.modules
            for prefix, module in each.module.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        for prefix, module, name, buffer in buffers:
            if not torch.equal(buffer, kept_of(module, name)):
                path = f"{prefix}.{name}" if prefix else name
                raise UsageError(
                    f"the forward has changed the buffer {path!r}, and with `summation: "
                    "fixed_order` nothing may follow from which shards a rank has had. BatchNorm's "
                    "running statistics do: use GroupNorm or LayerNorm, "
                    "track_running_stats=False, or freeze it with .eval(); or leave summation out"
                )
