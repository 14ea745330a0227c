"""Gradients that a loop adds up over several of its steps, and that no optimizer has used yet.

Most loops leave gradients behind that nobody uses again. Those of a part of a model count from the
first step on that was trained without an update of its weights; they are looked at only in such
steps and when something is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from hydroslurm.checkpoint.tree import local_of
from hydroslurm.errors import StateMismatch
from hydroslurm.training.objects import bare

_LOOKED_AT = 16
"""Weights, spread over a model and its parts, by which it is seen that an optimizer has stepped."""
Part: TypeAlias = tuple[str, str]
"""A model's name, and the first word in the names of some of its parameters."""


class Gradients:
    """Of one rank.

    Args:
        models: by name; what is no module is passed over.
    """

    def __init__(self, models: Callable[[], Mapping[str, Any]]) -> None:
        self._models = models
        self._weights: dict[Part, list[torch.Tensor]] = {}
        self._versions: list[int] = []
        self._adding_up: set[Part] = set()
        self._loaded: Mapping[str, Mapping[str, torch.Tensor]] = {}

    def begin(self) -> None:
        """The first step comes next. What was loaded is put in place again: a loop may have zeroed
        its gradients before it begins."""
        parts: dict[Part, list[torch.Tensor]] = {}
        for name, model in self._modules():
            for key, one in model.named_parameters():
                if one.requires_grad:
                    parts.setdefault((name, _part(key)), []).append(one)
        most = max(1, _LOOKED_AT // max(1, len(parts)))
        self._weights = {part: all_[:: -(-len(all_) // most)] for part, all_ in parts.items()}
        self._versions = self._versions_now()
        self._put()

    def end_step(self) -> None:
        """A safe point was reached."""
        self._loaded = {}
        before, self._versions = self._versions, self._versions_now()
        for part, now, then in zip(self._weights, self._versions, before, strict=True):
            if now == then and part not in self._adding_up and self._are_of_use(part):
                self._adding_up.add(part)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Model -> parameter -> gradient; empty for a loop that updates in each step."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for (name, key), grad in self._gradients():
            if (name, _part(key)) in self._adding_up and grad.any():
                found.setdefault(name, {})[key] = grad
        return found

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Raises:
        StateMismatch: a model has no such parameter.
        """
        self._loaded = state
        self._adding_up.update((name, _part(key)) for name, grads in state.items() for key in grads)
        self._put()

    def _put(self) -> None:
        models = dict(self._modules())
        for name, grads in self._loaded.items():
            parameters = dict(models[name].named_parameters()) if name in models else {}
            for key, saved in grads.items():
                one = parameters.get(key)
                if one is None or local_of(one).shape != saved.shape:
                    raise StateMismatch(
                        f"the checkpoint has a gradient of shape {list(saved.shape)} for {key} of "
                        f"{name}, which this model does not have; use another directory= to start "
                        "anew"
                    )
                one.grad = torch.zeros_like(one)
                local_of(one.grad).copy_(saved)

    def _are_of_use(self, part: Part) -> bool:
        """Whether there are any, and no GradScaler has left the step out because of them."""
        grads = [one for (name, key), one in self._gradients() if (name, _part(key)) == part]
        return any(one.any() for one in grads) and all(one.isfinite().all() for one in grads)

    def _versions_now(self) -> list[int]:
        return [sum(one._version for one in some) for some in self._weights.values()]

    def _modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for name, thing in self._models().items():
            if isinstance(model := bare(thing), torch.nn.Module):
                yield name, model

    def _gradients(self) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
        for name, model in self._modules():
            for key, one in model.named_parameters():
                if one.grad is not None and one.grad.layout is torch.strided:
                    yield (name, key), local_of(one.grad).detach()


def _part(key: str) -> str:
    return key.partition(".")[0]
