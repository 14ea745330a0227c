"""What a rank has of a model beside the weights that all share: buffers that differ, and what is in
no ``state_dict()``: which weights are trained, and how its modules are set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hydroslurm.checkpoint.tree import is_dtensor
from hydroslurm.errors import StateMismatch
from hydroslurm.integrations.attributes import is_of_library
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


class ModuleSettings:
    """The numbers and flags that modules have as attributes, such as a dropout's probability or the
    mode that a part of the model is left in, and whether a parameter is trained, as far as they
    have changed since :meth:`remember`: by a callback that freezes and thaws, or a schedule.

    Frameworks set them when an epoch begins, which a resumed one does not.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._before: dict[str, dict[str, Any]] = {}
        self._restored: dict[str, set[str]] = {}

    def remember(self) -> None:
        """What will not have changed from now on is as the script makes it."""
        self._before = {place: _settings(one) for place, one in self._parts()}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        changed = {}
        for place, one in self._parts():
            now, before = _settings(one), self._before.get(place, {})
            if now == before and place not in self._restored:
                continue
            also = self._restored.get(place, ())
            found = {
                name: value
                for name, value in now.items()
                if name in also or name not in before or value != before[name]
            }
            if found:
                changed[place] = found
        return changed

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """What is not there any more is left out: the weights' shapes have been compared."""
        self._restored = {place: set(settings) for place, settings in state.items()}
        for place, one in self._parts():
            for name, value in state.get(place, {}).items():
                if name == "requires_grad" and isinstance(one, torch.Tensor):
                    one.requires_grad_(value)
                else:
                    setattr(one, name, value)

    def _parts(self) -> Iterator[tuple[str, Any]]:
        for number, model in enumerate(self._models()):
            own = bare(model)
            for name, module in own.named_modules():
                if not type(module).__module__.startswith("torchmetrics."):
                    yield f"{number}.{name}", module
            for name, weight in own.named_parameters():
                yield f"{number}.{name} (parameter)", weight


def _settings(part: Any) -> dict[str, Any]:
    if isinstance(part, torch.Tensor):
        return {"requires_grad": part.requires_grad}
    if not is_of_library(part):  # the rest of what it has is one of its attributes
        return {"training": part.training}
    return {
        name: value
        for name, value in vars(part).items()
        if type(value) in (bool, int, float, str) and not name.startswith("_")
    }
