"""A state that a framework hands over when it is asked for it, and takes back when it is ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hydroslurm.checkpoint.tree import is_dtensor


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
        self._fingerprint: Callable[[], object] | None = None
        self._weights: object = None
        self._is_unchanged: bool | None = None

    def state_dict(self) -> Mapping[str, Any]:
        return self._frozen or self.loaded or self._capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state

    def freeze(self, fingerprint: Callable[[], object]) -> None:
        """The state of now is what is saved until :meth:`thaw`. Tensors are not copied: what this
        makes of them tells whether they still show it."""
        self._frozen = self._capture()
        self._fingerprint, self._weights = fingerprint, fingerprint()
        self._is_unchanged = None

    def thaw(self) -> None:
        """The state is what is there again."""
        self._frozen = self._fingerprint = self._is_unchanged = None

    def is_unchanged(self) -> bool:
        """Whether the frozen state is still what the tensors show: looked at once, in the first
        call after :meth:`freeze`. False where nothing is frozen."""
        if self._is_unchanged is None:
            if self._fingerprint is None:
                return False
            self._is_unchanged = self._weights == self._fingerprint()
        return self._is_unchanged


def fingerprint(weights: Mapping[str, Any]) -> dict[str, int]:
    """A sum of the bits of each weight and buffer, which differs once something else is in their
    place. Counters of versions would not see a write through ``.data``, nor BatchNorm's own."""
    sums: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        local = value.to_local() if is_dtensor(value) else value
        plain = isinstance(local, torch.Tensor) and local.layout is torch.strided
        if plain and local.numel() and not local.is_quantized:
            flat = local.detach().reshape(-1)
            sums[name] = flat.view(_integers(flat)).sum(dtype=torch.int64)
    found = torch.stack([one.cpu() for one in sums.values()]).tolist() if sums else []
    return dict(zip(sums, found, strict=True))


def _integers(tensor: torch.Tensor) -> torch.dtype:
    """As wide as the elements of this tensor; of wider ones, bytes."""
    wide = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return wide.get(tensor.element_size(), torch.uint8)
