"""What a rank has of a model beside its weights: buffers that differ, the order of DDP's sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hydroslurm.checkpoint.tree import is_dtensor
from hydroslurm.errors import StateMismatch
from hydroslurm.integrations.handed import fingerprint
from hydroslurm.training.ddp_buckets import bucket_order, settle_buckets
from hydroslurm.training.objects import bare
from hydroslurm.training.reporting import notice

Models = Callable[[], Iterable[Any]]
"""The models that are trained, as DDP has wrapped them; asked for when they are there."""


class RankBuffers:
    """The buffers of one rank of several that have changed since the training began.

    The shared state has those of one rank. Others see other batches, and their BatchNorm other
    statistics: FSDP never compares them, and DDP only where it trains, not in an evaluation.
    """

    def __init__(self, models: Models, *, world_size: int) -> None:
        self._models = models
        self._is_alone = world_size == 1
        self._before: dict[str, int] = {}
        self._restored: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Buffers that do not change from now on are as the script or the shared state has them."""
        if not self._is_alone:
            self._before = fingerprint(self._buffers())

    def state_dict(self) -> dict[str, torch.Tensor]:
        if self._is_alone:
            return {}
        buffers = self._buffers()
        return {
            name: buffers[name]
            for name, bits in fingerprint(buffers).items()
            if name in self._restored or bits != self._before.get(name)
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raises:
        StateMismatch: one is not there, or has another shape.
        """
        if self._is_alone:
            return
        buffers = self._buffers()
        self._restored = frozenset(state)
        for name, saved in state.items():
            buffer = buffers.get(name)
            if buffer is None or buffer.shape != saved.shape:
                here = "none" if buffer is None else f"one of shape {list(buffer.shape)}"
                raise StateMismatch(
                    f"the checkpoint has a buffer {name} of shape {list(saved.shape)}, and this "
                    f"model {here}; begin anew with another directory="
                )
            buffer.copy_(saved)

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"{number}.{name}": buffer
            for number, model in enumerate(self._models())
            for name, buffer in bare(model).named_buffers()
            if not is_dtensor(buffer)
        }


class BucketOrder:
    """The order in which DDP's buckets were made after the first step: see
    :mod:`hydroslurm.training.ddp_buckets`. A resumed attempt makes them before its first."""

    def __init__(self, models: Models, *, world_size: int) -> None:
        self._models = models
        self._matters = world_size > 2
        self._orders: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        if self._matters and not any(self._orders):
            self._orders = [bucket_order(model) for model in self._models()]
        return {"orders": self._orders}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._orders = state["orders"] if self._matters else []
        for model, order in zip(self._models(), self._orders, strict=False):
            if order and not settle_buckets(model, order):
                notice(
                    "DistributedDataParallel reduces other parameters than before, or sparse ones: "
                    "the first step of this attempt may differ in the last bits"
                )
