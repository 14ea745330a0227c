"""Gradient accumulation: no copy of the state holds partial gradients, so members join and leave
only after the optimizer step that uses them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

_MOST = 64
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
    return parameters[:: 1 + len(parameters) // _MOST]
