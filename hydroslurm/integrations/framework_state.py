"""What is saved of a training that a framework leads: the state that it hands over, and what the
script keeps beside it. Of that, only what has changed since the training began is saved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hydroslurm.checkpoint.tree import local_of
from hydroslurm.errors import StateMismatch


class Handed:
    """What is saved of a framework: what was loaded, until the training has begun; within an
    evaluation what was there when it began; else what is there now.

    Attributes:
        loaded: from the checkpoint that the run goes on from; None once the framework has it.
        is_unchanged: whether the frozen state is still what the tensors show: looked at once, in
            the first call after :meth:`freeze`. False where nothing is frozen.
    """

    is_unchanged: Callable[[], bool]
    _frozen: Mapping[str, Any] | None

    def __init__(self, capture: Callable[[], Mapping[str, Any]]) -> None:
        self._capture = capture
        self.loaded: Mapping[str, Any] | None = None
        self.thaw()

    def state_dict(self) -> Mapping[str, Any]:
        return self._frozen or self.loaded or self._capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state

    def freeze(self, fingerprint: Callable[[], object]) -> None:
        """The state of now is what is saved until :meth:`thaw`. Tensors are not copied: what this
        makes of them tells whether they still show it."""
        self._frozen = self._capture()
        before = fingerprint()
        self.is_unchanged = functools.cache(lambda: before == fingerprint())

    def thaw(self) -> None:
        """The state is what is there again."""
        self._frozen = None
        self.is_unchanged = lambda: False


class OtherModules:
    """Modules beside the model that all ranks have alike, such as a reference model that follows
    it. Saved are those that have changed since the training began.

    Args:
        find: the modules, with names that are the same in each attempt; asked anew each time.
    """

    def __init__(self, find: Callable[[], Iterable[tuple[str, torch.nn.Module]]]) -> None:
        self._find = find
        self._before: dict[str, Any] = {}
        self._restored: frozenset[str] = frozenset()

    def remember(self) -> None:
        """Those that do not change from now on are as the script makes them."""
        self._before = {name: fingerprint(one.state_dict()) for name, one in self._find()}

    def state_dict(self) -> dict[str, Any]:
        states = {name: one.state_dict() for name, one in self._find()}
        return {
            name: state
            for name, state in states.items()
            if name in self._restored or fingerprint(state) != self._before.get(name)
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Raises:
        StateMismatch: one is not there, or does not fit.
        """
        here = dict(self._find())
        self._restored = frozenset(states)
        for name, state in states.items():
            try:
                here[name].load_state_dict(state)
            except (KeyError, RuntimeError, ValueError, TypeError) as error:
                raise StateMismatch(
                    f"the checkpoint has the state of {name}, which this script does not have, or "
                    f"in another form: {error}; begin anew with another directory="
                ) from error


def fingerprint(weights: Mapping[str, Any]) -> dict[str, int]:
    """A sum of the bits of each weight and buffer, which differs once something else is in their
    place. Counters of versions would not see a write through ``.data``, nor BatchNorm's own."""
    sums: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        local = local_of(value)
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
