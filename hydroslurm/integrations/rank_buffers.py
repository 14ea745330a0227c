"""What one rank has of a model's buffers beside those that all share."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hydroslurm.checkpoint.tree import is_dtensor
from hydroslurm.errors import StateMismatch
from hydroslurm.integrations.handed import fingerprint
from hydroslurm.training.ddp_buckets import Models
from hydroslurm.training.objects import bare


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
