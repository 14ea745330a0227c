"""Gradients that are being accumulated: no copy of the state has them, so that members come and go
behind the step of an optimizer that uses them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

_MOST = 64
"""Weights that are looked at."""


class Accumulation:
    """The gradients of one rank between two steps of its optimizers; the same on all ranks."""

    def __init__(self) -> None:
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def used(self, parameters: Sequence[torch.Tensor]) -> None:
        """An optimizer has stepped."""
        grads = ((id(one), one.grad) for one in _some(parameters))
        self._used = {
            key: (weakref.ref(grad), grad._version) for key, grad in grads if grad is not None
        }

    def is_under_way(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether there are gradients that no optimizer has used; waits for the device if some have
        changed since the last step."""
        return any(
            one.grad is not None and not self._is_used(id(one), one.grad) and bool(one.grad.any())
            for one in _some(parameters)
        )

    def _is_used(self, key: int, grad: torch.Tensor) -> bool:
        # by reference: a new gradient may lie where the last one was
        reference, version = self._used.get(key, (None, 0))
        return reference is not None and reference() is grad and grad._version == version


def _some(parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return parameters[:: 1 + len(parameters) // _MOST]
