"""How the modules of a model are set, and which of its weights are trained: no ``state_dict()`` has
it, and a training may change it on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hydroslurm.checkpoint.tree import is_dtensor
from hydroslurm.training.attributes import is_of_library
from hydroslurm.training.objects import bare


class ModuleSettings:
    """The numbers and flags that modules have as attributes, such as a dropout's probability or the
    mode that a part of the model is left in, and whether a parameter is trained, as far as they
    have changed since :meth:`remember`: by a loop that freezes and thaws, or a schedule.

    The modes within a model that is in evaluation mode itself are those of an evaluation: what is
    saved is how they were in the training, at the last look.

    Args:
        models: by name or number, with or without wrappers; asked for when they are there.
    """

    def __init__(self, models: Callable[[], Mapping[Any, Any]]) -> None:
        self._models = models
        self._before: dict[str, dict[str, Any]] = {}
        self._restored: dict[str, set[str]] = {}
        self._modes: dict[str, bool] = {}
        self._versions: dict[int, int] = {}

    def remember(self) -> None:
        """What will not have changed from now on is as the script makes it."""
        self._before = dict(self._now())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        changed = {}
        for place, now in self._now():
            before = self._before.get(place, {})
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
        for _, place, one in self._parts():
            for name, value in state.get(place, {}).items():
                if name == "requires_grad" and isinstance(one, torch.Tensor):
                    one.requires_grad_(value)
                else:
                    setattr(one, name, value)
                    if name == "training":
                        self._modes[place] = value

    def begin(self) -> None:
        """The first step comes next: from here on a frozen weight does not change."""
        self._versions.clear()
        self.frozen()

    def frozen(self) -> set[int]:
        """Where in memory the weights are that are not trained, and that nothing else has changed
        since they were seen here first, as it would a teacher's."""
        found = set()
        for model in self._models().values():
            for weight in bare(model).parameters():
                if weight.requires_grad or is_lazy(weight):
                    continue
                local = weight.to_local() if is_dtensor(weight) else weight
                place, version = local.data_ptr(), weight._version
                if self._versions.setdefault(place, version) == version:
                    found.add(place)
        return found

    def _now(self) -> Iterator[tuple[str, dict[str, Any]]]:
        trains = {name: bare(model).training for name, model in self._models().items()}
        for model_name, place, one in self._parts():
            now = _settings(one)
            if "training" in now:
                if trains[model_name]:
                    self._modes[place] = now["training"]
                now["training"] = self._modes.get(place, now["training"])
            yield place, now

    def _parts(self) -> Iterator[tuple[Any, str, Any]]:
        for model_name, model in self._models().items():
            own = bare(model)
            for name, module in own.named_modules():
                if not type(module).__module__.startswith("torchmetrics."):
                    yield model_name, f"{model_name}.{name}", module
            for name, weight in own.named_parameters():
                yield model_name, f"{model_name}.{name} (parameter)", weight


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
