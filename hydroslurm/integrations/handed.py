"""A state that a framework hands over when it is asked for it, and takes back when it is ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class Handed:
    """What is saved of a framework: what was loaded, until the training has begun; within an
    evaluation what was there when it began; else what is there now.

    Attributes:
        loaded: from the checkpoint that the run goes on from; None once the framework has it.
    """

    def __init__(self, capture: Callable[[], Mapping[str, Any]]) -> None:
        self._capture = capture
        self.loaded: Mapping[str, Any] | None = None
        self._frozen: Mapping[str, Any] | None = None
        self._module: torch.nn.Module | None = None
        self._weights: list[int] = []
        self._is_unchanged: bool | None = None

    def state_dict(self) -> Mapping[str, Any]:
        return self._frozen or self.loaded or self._capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state

    def freeze(self, module: torch.nn.Module) -> None:
        """The state of now is what is saved until :meth:`thaw`. Tensors are not copied."""
        self._frozen = self._capture()
        self._module, self._weights = module, fingerprint(module)
        self._is_unchanged = None

    def thaw(self) -> None:
        """The state is what is there again."""
        self._frozen = self._module = self._is_unchanged = None

    def is_unchanged(self) -> bool:
        """Whether the frozen state is still what the tensors show: looked at once, in the first
        call after :meth:`freeze`. False where nothing is frozen."""
        if self._is_unchanged is None:
            if self._module is None:
                return False
            self._is_unchanged = self._weights == fingerprint(self._module)
        return self._is_unchanged


def fingerprint(module: torch.nn.Module) -> list[int]:
    """A sum of the bits of each weight and buffer, which differs once something else is in their
    place. Counters of versions would not see a write through ``.data``."""
    sums = []
    for value in module.state_dict().values():
        plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if plain and value.numel() and not value.is_quantized:
            flat = value.detach().reshape(-1)
            sums.append(flat.view(_integers(flat)).sum(dtype=torch.int64))
    return torch.stack([one.cpu() for one in sums]).tolist() if sums else []


def _integers(tensor: torch.Tensor) -> torch.dtype:
    """As wide as the elements of this tensor; of wider ones, bytes."""
    wide = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return wide.get(tensor.element_size(), torch.uint8)
